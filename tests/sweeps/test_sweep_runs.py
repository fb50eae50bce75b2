"""Sweeps: every point once, failures as rows (G18), resume (G19), every backend alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from oled import simulate
from oled.errors import UserError
from oled.results import table as results
from oled.results.claims import claimed
from oled.sim import clock_replay as again
from oled.sweeps import Configuration, Workers, product, run, simulation, sweep
from oled.sweeps.journal import DECLARATION, ROWS

HERE = Workers(count=1)
FIVE = {"cache.slots": [8, 12, 16, 20, 24], "policy": "inter_iteration"}
BROKEN = """\
name: broken
description: raises in the middle of a run
retention: {_target_: broken_part.Broken}
admission: demand
"""
BROKEN_PART = """\
import dataclasses
from oled.policies.retention.lru import Lru


@dataclasses.dataclass(frozen=True)
class Broken(Lru):
    def params(self):
        raise RuntimeError("out of luck")
"""


def test_every_point_once_in_the_order_given() -> None:
    points = product({"policy": ["lru", "oled"], "cache.slots": [8, 16]}, {"seed": 1})
    assert [point.overrides for point in points] == [
        "seed=1 policy=lru cache.slots=8",
        "seed=1 policy=lru cache.slots=16",
        "seed=1 policy=oled cache.slots=8",
        "seed=1 policy=oled cache.slots=16",
    ]
    assert len(product([{"policy": ["lru", "oled"]}, {"policy": ["oled", "lfu"]}])) == 3


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"cache.slts": [1]}, "there is no key 'cache.slts'; did you mean 'cache.slots'"),
        ({"policy": []}, "an axis is empty"),
        ({"policy": "lruu"}, "did you mean 'lru'"),
        ({"hardware": "h200@slw"}, "did you mean 'slow'"),
        ({"trace": "synthetic", "trace.block_lenght": 8}, "did you mean 'block_length'"),
        ({"trace.block_length": 8}, "is a key of trace=synthetic"),
        ({"policy": "epic", "topology": "nvlink8"}, "did you mean 'nvlink_8'"),
        ({"policy": "epic"}, "'epic' places experts on several GPUs"),
        ({"policy": "lru", "topology": "nvlink_8"}, "policy 'lru' runs on one GPU"),
        ({"trace": "synthetic", "trace.workload": "gsm"}, "did you mean 'gsm8k'"),
    ],
)
def test_what_is_misspelt_is_refused_before_anything_runs(axes, message) -> None:
    with pytest.raises(UserError, match=message):
        sweep(axes, workers=HERE)


def test_a_default_that_is_spelt_out_is_no_other_point() -> None:
    axes = [{"policy": ["lru", "lfu"]}, {"policy": "lru", "workload.batch_size": [1, 2]}]
    table = sweep(axes, workers=HERE)
    assert list(zip(table["policy"], table["batch_size"], strict=True)) == [
        ("lru", 1),
        ("lfu", 1),
        ("lru", 2),
    ]


def test_a_row_is_the_simulation() -> None:
    table = sweep(
        {"hardware.h2d_pinned": ["20 GB/s", "40 GB/s"]},
        base={"policy": "oled", "cache.slots": 20, "cost.geometry": "llada2_mini"},
        workers=HERE,
    )
    profile = Configuration.of([("hardware.h2d_pinned", "20 GB/s")]).hardware()
    alone = simulate("demo", "oled", hardware=profile, slots=20, geometry="llada2_mini")
    assert next(iter(table)) == "hardware.h2d_pinned"  # the swept axis
    first = table.iloc[0]
    assert first["tpot_ns"] == alone.metrics["tpot_ns"] > table["tpot_ns"][1]
    assert first["ref_belady_pooled_tpot_ns"] == alone.metrics["ref_belady_pooled_tpot_ns"]
    assert first["provenance.trace_hash"] == alone.metrics["provenance"]["trace_hash"]
    assert first["hardware.h2d_pinned"] == "20 GB/s"
    assert first["provenance.versions.numpy"]


def test_decisions_that_no_link_changes_are_made_once(monkeypatch) -> None:
    axes = {"policy": ["lru", "oled"], "hardware.h2d_pinned": ["20 GB/s", "40 GB/s"]}
    table = sweep(axes, base={"cost.geometry": "llada2_mini"}, workers=HERE)
    simulation._prepare_once.cache_clear()
    monkeypatch.setattr(again, "repeatable", lambda composition: False)
    anew = sweep(axes, base={"cost.geometry": "llada2_mini"}, workers=HERE)
    simulation._prepare_once.cache_clear()
    pd.testing.assert_frame_equal(table.drop(columns="wall_s"), anew.drop(columns="wall_s"))


def test_machines_stand_side_by_side() -> None:
    points = product(
        {"hardware.h2d_pinned": [8, 16], "cache.slots": [8, 12], "policy": ["lru", "lfu"]}
    )
    groups = run._groups({point.overrides: point for point in points})
    names = [[point.value("policy.name") for _, point in group] for group in groups]
    assert names == [["lru", "lfu"]] * 4
    first = [group[0][1] for group in groups]
    places = [(one.value("cache.slots"), one.value("hardware.h2d_pinned")) for one in first]
    assert places == [(8, 8), (8, 16), (12, 8), (12, 16)]


def test_the_ends_of_a_profile() -> None:
    ends = {"hardware": ["h200@fast", "h200@slow"], "cost.geometry": "llada2_mini"}
    fast, slow = sweep(ends, workers=HERE)["tpot_ns"]
    assert fast < slow


def broken_in_the_middle(folder: Path) -> dict[str, list[str]]:
    (folder / "broken.yaml").write_text(BROKEN)
    (folder / "broken_part.py").write_text(BROKEN_PART)
    return {"policy": ["inter_iteration", str(folder / "broken.yaml"), "lru"]}


def test_g18_a_failing_configuration_stays_as_a_row(tmp_path: Path) -> None:
    axes = broken_in_the_middle(tmp_path)
    table = sweep(axes, out=tmp_path / "out", workers=HERE)
    assert list(table["error"].isna()) == [True, False, True]
    assert table["error"][1] == "RuntimeError: out of luck"
    assert table["overrides"][1] == f"policy={tmp_path / 'broken.yaml'}"
    assert len(results.read_table(tmp_path / "out")) == 2
    again = sweep(axes, out=tmp_path / "out", resume=True, workers=HERE)
    assert len(again) == 3
    sys.path.remove(str(tmp_path))


def stop_after(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The (number + 1)-th group is Ctrl-C; returns the list that names what was computed."""
    computed: list[str] = []
    real = run.simulate_all

    def simulate_all(group):
        if len(computed) == number:
            raise KeyboardInterrupt
        computed.append(group[0][1].overrides)
        return real(group)

    monkeypatch.setattr(run, "simulate_all", simulate_all)
    return computed


def test_g19_what_is_missing_is_computed(tmp_path: Path, monkeypatch) -> None:
    stop_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        sweep(FIVE, out=tmp_path, workers=HERE)
    assert list(pd.read_parquet(tmp_path / results.TABLE)["slots"]) == ["8", "12"]
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"torn')
    monkeypatch.undo()
    computed = stop_after(99, monkeypatch)
    table = sweep(FIVE, out=tmp_path, resume=True, workers=HERE)
    assert len(computed) == 3
    assert list(table["slots"]) == ["8", "12", "16", "20", "24"]
    monkeypatch.undo()
    whole = sweep(FIVE, workers=HERE)
    assert list(whole["tpot_ns"]) == list(table["tpot_ns"])


def test_g19_what_other_code_has_computed_is_computed_again(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.yaml").write_text(BROKEN.replace("broken_part.Broken", "my_part.Mine"))
    part = tmp_path / "my_part.py"
    part.write_text("from oled.policies.retention.lru import Lru\n\n\nclass Mine(Lru):\n    pass\n")
    axes = {"policy": ["lru", str(tmp_path / "mine.yaml")]}
    sweep(axes, out=tmp_path / "out", workers=HERE)
    computed = stop_after(99, monkeypatch)
    sweep(axes, out=tmp_path / "out", resume=True, workers=HERE)
    assert computed == []
    part.write_text(f"{part.read_text()}\n# better now\n")
    sweep(axes, out=tmp_path / "out", resume=True, workers=HERE)
    assert computed == [f"policy={tmp_path / 'mine.yaml'}"]
    sys.path.remove(str(tmp_path))


def test_g19_another_base_or_trace_is_refused(tmp_path: Path) -> None:
    two = FIVE | {"cache.slots": [8, 12]}
    sweep(two, out=tmp_path, workers=HERE)
    with pytest.raises(UserError, match=r"base configuration has changed: cache\.staging was 8"):
        sweep(two, base={"cache.staging": 4}, out=tmp_path, resume=True, workers=HERE)
    declaration = json.loads((tmp_path / DECLARATION).read_text())
    declaration["traces"]["demo"] = "another"
    (tmp_path / DECLARATION).write_text(json.dumps(declaration))
    with pytest.raises(UserError, match="hash of a trace has changed: demo was another"):
        sweep(two, out=tmp_path, resume=True, workers=HERE)


def test_a_second_sweep_does_not_mix_with_an_older_one(tmp_path: Path) -> None:
    sweep(FIVE | {"cache.slots": [8, 12]}, out=tmp_path, workers=HERE)
    table = sweep(FIVE | {"cache.slots": [16]}, out=tmp_path, workers=HERE)
    assert list(table["slots"]) == ["16"]
    assert len((tmp_path / ROWS).read_text().splitlines()) == 1


def test_two_sweeps_do_not_write_to_one_folder(tmp_path: Path) -> None:
    two = FIVE | {"cache.slots": [8, 12]}
    sweep(two, out=tmp_path, workers=HERE)
    with (
        claimed(tmp_path),
        pytest.raises(UserError, match="another run is writing here"),
    ):
        sweep(two, out=tmp_path, workers=HERE)
    assert len(sweep(two, out=tmp_path, resume=True, workers=HERE)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loky", "dask", "ray"])
def test_every_backend_gives_the_same_rows(backend: str) -> None:
    module = {"loky": "joblib", "dask": "dask.distributed", "ray": "ray"}[backend]
    pytest.importorskip(module, reason=f"the extra oled[{backend}] is not installed")
    axes = FIVE | {"cache.slots": [8, 12]}
    here = sweep(axes, workers=HERE)
    there = sweep(axes, workers=Workers(backend, count=2))
    same = [column for column in here if column not in ("wall_s",)]
    pd.testing.assert_frame_equal(here[same], there[same])


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UserError, match=r"sweep\.backend=dsk: did you mean 'dask'"):
        Workers("dsk")


def test_overrides_can_be_typed_again() -> None:
    point = Configuration.of([("policy", "lru"), ("hardware.h2d_pinned", "20 GB/s")])
    assert point.overrides == "policy=lru hardware.h2d_pinned='20 GB/s'"


def test_topologies_are_an_axis_and_stand_in_the_rows(tmp_path: Path) -> None:
    """Placements on several GPUs, beside a policy of one; the rows are those of single runs."""
    from oled.parallel.api import simulate as simulate_parallel

    base = {"hardware": "h100_sxm", "workload.batch_size": 4}
    several = {"policy": ["static_ep", "epic"], "topology": ["nvlink_8", "nodes_2x4"]}
    axes = [several, {"policy": "lru", "cache.slots": 20}]
    table = sweep(axes, base=base, out=tmp_path, workers=HERE)
    assert table["error"].isna().all()
    assert table["topology"].tolist()[:4] == ["nvlink_8", "nodes_2x4"] * 2
    assert table["policy"].tolist() == ["static_ep", "static_ep", "epic", "epic", "lru"]
    assert pd.isna(table["topology"][4])
    assert table["slots"].notna().tolist() == [False] * 4 + [True]
    assert table["digest"].nunique() == 5
    for row in (0, 3):
        policy, topology = table["policy"][row], table["topology"][row]
        alone = simulate_parallel("demo", policy, topology, hardware="h100_sxm", batch_size=4)
        assert table["tpot_ns"][row] == alone.metrics["tpot_ns"]
        assert table["imbalance"][row] == alone.metrics["imbalance"]
    fewer = {"policy": "epic", "topology": "nodes_2x4", "topology.gpus_per_node": 2}
    row = sweep(fewer, base=base, workers=HERE)
    assert (row["ranks"][0], row["topology.gpus_per_node"][0]) == (4, "2")
