"""`oled simulate`, by itself and as a sweep, where torch can not be imported."""

from __future__ import annotations

import gzip
import json
import shutil
from datetime import datetime

import pandas as pd
import pytest

from oled.cli import runs
from oled.cli.main import main
from oled.paths import trace_path
from oled.results.claims import claimed
from oled.sweeps import Workers, sweep

ALONE = ["sweep.workers=1"]

PART = """\
import dataclasses
from oled.policies.retention.lru import Lru


@dataclasses.dataclass(frozen=True, slots=True)
class Mine(Lru):
    pass
"""

COMPOSITION = """\
name: mine
description: LRU that competes
retention: {_target_: my_part.Mine}
admission: compete
"""


def metrics(file) -> dict:
    found = json.loads(file.read_text())
    found.pop("wall_s")
    return found


def test_a_run_prints_its_table_and_writes_its_metrics(oled, tmp_path):
    done = oled("simulate", "trace=demo", "policy=lru", "cache.slots=10", "out=run", torch=False)
    assert done.returncode == 0, done.stderr
    compiling = "oled: compiling the simulator for this machine, once (about 15 s)\n"
    assert done.stderr in ("", compiling)
    assert "hit rate" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("run/metrics.json")
    found = metrics(tmp_path / "run" / "metrics.json")
    assert found["provenance"]["policy"] == "lru"
    assert found["hits"] + found["transfers"] == found["accesses"]
    assert (tmp_path / "run" / ".hydra" / "overrides.yaml").is_file()


def test_the_same_run_gives_the_same_metrics_by_name_and_by_folder(oled, tmp_path):
    words = ["simulate", "policy=lru", "cache.slots=0.25"]
    for out, trace in (("a", "demo"), ("b", str(trace_path("demo")))):
        assert oled(*words, f"trace={trace}", f"out={out}", torch=False).returncode == 0
    assert metrics(tmp_path / "a" / "metrics.json") == metrics(tmp_path / "b" / "metrics.json")


def test_a_sweep_ends_with_one_table(oled, tmp_path):
    words = ["-m", "policy=lru,oled_priority", "cache.slots=8,16", "out=sweep", *ALONE]
    done = oled("simulate", *words, torch=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("policy=lru cache.slots=8") == 1
    assert done.stdout.splitlines()[-1] == "sweep/results.parquet"
    table = pd.read_parquet(tmp_path / "sweep" / "results.parquet")
    assert table["policy"].tolist() == ["lru", "lru", "oled_priority", "oled_priority"]
    assert table["slots"].tolist() == ["8", "16", "8", "16"]
    assert table["error"].isna().all()
    assert (table["tpot_ns"] > 0).all()


def test_a_job_that_fails_leaves_the_others_alone_and_is_named(oled, tmp_path):
    done = oled(
        "simulate", "-m", "policy=lru", "cache.staging=8,0,4", "out=sweep", *ALONE, torch=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "oled: 1 of 3 runs failed"
    assert "oled: policy=lru cache.staging=0 failed: cache.staging=0:" in done.stderr
    table = pd.read_parquet(tmp_path / "sweep" / "results.parquet")
    assert list(table)[:1] == ["staging"]  # the swept axis
    assert table["error"].notna().tolist() == [False, True, False]
    assert table["staging"].tolist() == ["8", "0", "4"]

    drawn = oled("plot", "fig05", "sweep", "--out", "figures", torch=False)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "figures" / "fig05.pdf").is_file()


def test_m_and_the_verb_sweep_make_the_same_table(oled, tmp_path):
    words = ["policy=choice(lru,lfu)", "cache.slots=range(8,17,8)", *ALONE]
    assert oled("simulate", "-m", *words, "out=a", torch=False).returncode == 0
    assert oled("sweep", *words, "out=b", torch=False).returncode == 0
    one, other = (pd.read_parquet(tmp_path / o / "results.parquet") for o in ("a", "b"))
    assert list(one)[:2] == ["policy", "slots"]
    assert one["slots"].tolist() == ["8", "16", "8", "16"]
    pd.testing.assert_frame_equal(one.drop(columns="wall_s"), other.drop(columns="wall_s"))
    in_python = sweep({"policy": ["lru", "lfu"], "cache.slots": [8, 16]}, workers=Workers(count=1))
    assert list(in_python) == list(one)
    assert in_python["digest"].tolist() == one["digest"].tolist()
    resumed = oled("simulate", "-m", *words, "resume=true", "out=b", torch=False)
    assert resumed.returncode == 0
    again = pd.read_parquet(tmp_path / "b" / "results.parquet")
    pd.testing.assert_frame_equal(again, other)  # wall_s, too: nothing was computed again


def test_runs_without_out_never_share_a_folder(tmp_path, monkeypatch, capsys):
    class Frozen(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(runs, "datetime", Frozen)
    monkeypatch.chdir(tmp_path)
    for policy, code in (("lru", 0), ("lru", 0), ("spice", 1)):
        assert main(["simulate", f"policy={policy}"]) == code
    made = sorted(path.name for path in (tmp_path / "outputs" / "simulate").iterdir())
    assert made == ["2026-01-02_03-04-05", "2026-01-02_03-04-05-2"]


def test_a_folder_in_use_is_refused(oled, tmp_path):
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "mine").touch()
        done = oled("simulate", "policy=lru", "out=run", torch=False)
    assert done.returncode == 1
    assert done.stderr == (
        "oled: run: another run is writing here; wait for it, or choose another out=DIR\n"
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_second_sweep_does_not_mix_with_the_first(oled, tmp_path):
    for values in ("8,16,32", "8,16"):
        words = ["policy=lru", f"cache.slots={values}", "out=sweep", *ALONE]
        assert oled("simulate", "-m", *words, torch=False).returncode == 0
    assert len(pd.read_parquet(tmp_path / "sweep" / "results.parquet")) == 2


@pytest.mark.parametrize("searched", [False, True], ids=["by file", "by search path"])
def test_a_policy_of_the_users_own(oled, tmp_path, searched):
    folder = tmp_path / "my_conf" / "policy"
    folder.mkdir(parents=True)
    (folder / "my_part.py").write_text(PART)
    (folder / "mine.yaml").write_text(COMPOSITION)
    words = (
        ["policy=mine", f"hydra.searchpath=[file://{folder.parent}]"]
        if searched
        else ["policy=my_conf/policy/mine.yaml"]
    )
    done = oled("simulate", *words, "out=run", torch=False)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run" / "metrics.json")["provenance"]["policy"] == "mine"


def test_a_timeline_of_the_first_block(oled, tmp_path):
    done = oled("simulate", "policy=lru", "timeline=block.json.gz", "out=run", torch=False)
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress((tmp_path / "block.json.gz").read_bytes()))["traceEvents"]
    assert {"GPU compute", "H2D link"} <= {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }


def test_a_number_of_the_machine_can_be_replaced(oled, tmp_path):
    for out, rate in (("slow", "5 GB/s"), ("fast", "60 GB/s")):
        words = [f"hardware.h2d_pinned='{rate}'", "cost.geometry=llada2_mini", f"out={out}"]
        assert oled("simulate", "policy=lru", *words, torch=False).returncode == 0
    slow, fast = (metrics(tmp_path / out / "metrics.json") for out in ("slow", "fast"))
    assert slow["tpot_ns"] > fast["tpot_ns"]
    assert slow["hits"] == fast["hits"]


def test_a_partial_trace_is_refused_unless_allowed(oled, tmp_path):
    shutil.copytree(trace_path("demo"), tmp_path / "cut")
    manifest = tmp_path / "cut" / "trace.json"
    manifest.write_text(manifest.read_text().replace('"complete"', '"partial"'))
    words = ["simulate", "trace=cut", "policy=lru", "out=run"]
    refused = oled(*words, torch=False)
    assert refused.returncode == 1
    assert "the trace is partial" in refused.stderr
    assert "allow_partial=true" in refused.stderr
    assert oled(*words, "trace.allow_partial=true", torch=False).returncode == 0
    assert oled("stats", "cut", torch=False).returncode == 1
    assert oled("stats", "cut", "--partial", torch=False).returncode == 0
