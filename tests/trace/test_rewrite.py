"""slice, merge, and the reading of older schema versions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small import diffusion, edit_manifest, geometry, manifest, record, routes, write

from oled.trace import (
    ConfidenceKind,
    ForwardRecord,
    Gap,
    Kept,
    Phase,
    Prediction,
    RouterScores,
    Trace,
    TraceError,
    WeightKind,
    load,
    read_manifest,
    select_requests,
)
from oled.trace.check import check
from oled.trace.cut import slice_trace
from oled.trace.files import file_sha256
from oled.trace.merge import merge_traces
from oled.trace.ranges import Ranges

SHAPE = geometry()


def with_side_tables(records: list[ForwardRecord]) -> list[ForwardRecord]:
    said = (
        Prediction("gate", 1, 2, np.array([3, 4]), np.array([0.5, 0.25])),
        Prediction("gate", 2, 3, np.array([1]), np.array([1.0])),
    )
    return [
        replace(
            one,
            predictions=said * (number % 2),
            scores=RouterScores(one.expert_ids, one.weights, one.weights + 1),
        )
        for number, one in enumerate(records)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four requests decoded in one batch, with all side tables, in several parts."""
    records = with_side_tables(diffusion(SHAPE, requests=4, interleaved=True))
    return write(tmp_path / "t", manifest(SHAPE), records, rows_per_part=60)


def assert_same(found: Trace, expected: Trace, *, but: tuple[str, ...] = ()) -> None:
    """All columns of all tables."""
    for table in ("forwards", "tokens", "routing", "predictions", "scores"):
        one, other = getattr(found, table), getattr(expected, table)
        assert (one is None) == (other is None), table
        for name in () if one is None else one.__slots__:
            if name not in but:
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


# --- slice ----------------------------------------------------------------------------------------


def test_sliced_requests_are_the_selected_ones(tmp_path: Path, folder: Path) -> None:
    found = load(slice_trace(folder, tmp_path / "s", requests=[1, 3]), verify=True)
    assert check(tmp_path / "s").ok
    assert_same(found, select_requests(load(folder), [1, 3]))
    assert found.manifest.provenance["kind"] == "slice"
    assert found.manifest.provenance["requests"] == "1,3"
    assert found.manifest.provenance["hash"] == load(folder).hash


def test_sliced_layers(tmp_path: Path, folder: Path) -> None:
    found, whole = load(slice_trace(folder, tmp_path / "s", layers=[2, 3])), load(folder)
    assert check(tmp_path / "s").ok
    assert found.geometry.moe_layers == (2, 3)
    assert found.geometry.expert_bytes == (1001, 1002)
    kept = np.isin(whole.routing.layer, [2, 3])
    np.testing.assert_array_equal(found.routing.expert_ids, whole.routing.expert_ids[kept])
    assert found.predictions is not None
    assert set(found.predictions.layer) == {2}
    assert found.num_forwards == whole.num_forwards


def test_sliced_forwards(tmp_path: Path, folder: Path) -> None:
    found, whole = load(slice_trace(folder, tmp_path / "s", forwards=range(3, 9))), load(folder)
    assert check(tmp_path / "s").ok
    rows = (whole.routing.forward >= 3) & (whole.routing.forward < 9)
    np.testing.assert_array_equal(found.routing.forward, whole.routing.forward[rows] - 3)
    np.testing.assert_array_equal(found.routing.weights, whole.routing.weights[rows])
    np.testing.assert_array_equal(found.forwards.pass_id, whole.forwards.pass_id[3:9])


def test_a_slice_of_everything_is_the_trace(tmp_path: Path, folder: Path) -> None:
    found = load(slice_trace(folder, tmp_path / "s"))
    assert_same(found, load(folder))
    bare = load(slice_trace(folder, tmp_path / "b", drop=["scores", "predictions"]))
    assert bare.scores is None
    assert bare.predictions is None


def test_gaps_follow_the_layers(tmp_path: Path) -> None:
    ids, weights = routes(np.random.default_rng(0), SHAPE, 3)
    rows = (np.arange(3), np.arange(3), np.array([2]))
    about = manifest(SHAPE, gaps=(Gap(3, Phase.DECODE, Kept.LAST_TOKEN, "pruned"),))
    source = write(tmp_path / "t", about, [record(ids, weights, row_tokens=rows)])
    for layers, gaps in (([1, 2], 0), ([2, 3], 1)):
        cut = load(slice_trace(source, tmp_path / f"{gaps}", layers=layers))
        assert len(cut.manifest.gaps) == gaps
        assert check(cut.path).ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": [9]}, "no request 9; there are 0 to 3"),
        ({"layers": [0]}, "no MoE layer 0; there are 1 to 3"),
        ({"forwards": [10_000]}, "no forward 10000"),
        ({"requests": [0], "forwards": [1]}, "no forward is of these requests and these forwards"),
        ({"drop": ["tokens"]}, "only scores and predictions can be left out"),
    ],
)
def test_slices_of_nothing(tmp_path: Path, folder: Path, options, message) -> None:
    with pytest.raises(TraceError, match=message):
        slice_trace(folder, tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_a_failing_slice_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    last = sorted(folder.glob("routing-*"))[-1]
    last.write_bytes(last.read_bytes()[:-200])
    with pytest.raises(TraceError, match=f"{last.name}: not readable as Parquet"):
        slice_trace(folder, tmp_path / "s", requests=[0])
    assert [file.name for file in tmp_path.iterdir()] == ["t"]


def test_a_destination_that_holds_something_is_kept(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "notes").write_text("mine")
    with pytest.raises(TraceError, match="s: already holds something"):
        slice_trace(folder, tmp_path / "s", requests=[0])
    assert (tmp_path / "s" / "notes").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert load(slice_trace(folder, tmp_path / "empty", requests=[0])).requests == (0,)


def test_ranges() -> None:
    ranges = Ranges.parse("0-2, 5", "requests")
    assert ranges.numbers("x") == (0, 1, 2, 5)
    assert str(ranges) == "0-2,5"
    for text in ("", "a", "3-1", "1-", "-1", "1,,2", "9" * 30, "1 2"):
        with pytest.raises(TraceError, match="requests="):
            Ranges.parse(text, "requests")
    with pytest.raises(TraceError, match="numbers are too many"):
        Ranges.parse("0-999999999", "x").numbers("x")


# --- merge ----------------------------------------------------------------------------------------


def test_merged_slices_are_the_whole(tmp_path: Path) -> None:
    records = with_side_tables(diffusion(SHAPE, requests=4))
    prompts = tuple({"hash": str(number)} for number in range(4))
    source = write(tmp_path / "t", manifest(SHAPE, prompts=prompts), records)
    parts = [
        slice_trace(source, tmp_path / name, requests=requests)
        for name, requests in (("a", [0]), ("b", [1, 2]), ("c", [3]))
    ]
    found = load(merge_traces(parts, tmp_path / "m"), verify=True)
    assert check(tmp_path / "m").ok
    assert_same(found, load(source), but=("pass_id",))
    assert found.manifest.prompts == prompts
    assert (np.diff(found.forwards.pass_id.astype(int)) > 0).all()
    assert [one["name"] for one in found.manifest.provenance["sources"]] == ["a", "b", "c"]


def test_requests_are_renumbered(tmp_path: Path, folder: Path) -> None:
    odd = slice_trace(folder, tmp_path / "odd", requests=[1, 3])
    found = load(merge_traces([odd, folder, odd], tmp_path / "m"))
    assert check(tmp_path / "m").ok
    assert found.requests == tuple(range(8))
    half = select_requests(found, [6, 7])
    assert_same(half, load(odd), but=("request", "pass_id"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"geometry": geometry(9)}, "differ in experts_per_layer"),
        ({"weight_kind": WeightKind.UNNORMALISED}, "differ in weight_kind: unnormalised and sum"),
        ({"confidence_kind": ConfidenceKind.CHOSEN_PROBABILITY}, "differ in confidence_kind"),
    ],
)
def test_what_can_not_be_merged(tmp_path: Path, folder: Path, changes, message) -> None:
    other = write(tmp_path / "o", manifest(SHAPE, **changes), diffusion(SHAPE))
    with pytest.raises(TraceError, match=message):
        merge_traces([folder, other], tmp_path / "m")
    with pytest.raises(TraceError, match="nothing to merge"):
        merge_traces([], tmp_path / "m")


def test_side_tables_must_agree(tmp_path: Path, folder: Path) -> None:
    bare = write(tmp_path / "o", manifest(SHAPE), diffusion(SHAPE))
    with pytest.raises(TraceError, match=r"differ in table 'scores'.*oled slice"):
        merge_traces([folder, bare], tmp_path / "m")


def test_what_one_source_lacks_the_whole_lacks(tmp_path: Path) -> None:
    gap = Gap(3, Phase.DECODE, Kept.NONE, "pruned")
    ids, weights = routes(np.random.default_rng(0), SHAPE, 2)
    rows = (np.arange(2), np.arange(2), np.array([], dtype=int))
    whole = write(tmp_path / "a", manifest(SHAPE), [record(ids, weights)])
    about = manifest(SHAPE, gaps=(gap,), lacks=("requests", "order"), ordered=False)
    pruned = write(tmp_path / "b", about, [record(ids, weights, row_tokens=rows)])
    found = load(merge_traces([whole, pruned], tmp_path / "m"))
    assert check(tmp_path / "m").ok
    assert not found.manifest.ordered
    assert found.manifest.lacks == ("requests", "order")
    assert [one.kept for one in found.manifest.gaps] == [Kept.SOME]


# --- partial traces -------------------------------------------------------------------------------


def test_partial_traces_need_a_word(tmp_path: Path, folder: Path) -> None:
    edit_manifest(folder, lambda data: data.update(status="partial"))
    with pytest.raises(TraceError, match="the trace is partial"):
        slice_trace(folder, tmp_path / "s", requests=[0])
    slice_trace(folder, tmp_path / "s", requests=[0], allow_partial=True)
    assert check(tmp_path / "s").ok


# --- older versions -------------------------------------------------------------------------------


def make_version_0(folder: Path) -> None:
    """As version 0 wrote it: without pass_id, produced, ordered and lacks."""
    data = json.loads((folder / "trace.json").read_text())
    data["schema_version"] = 0
    del data["ordered"], data["lacks"]
    for part in data["parts"]:
        file = folder / part["file"]
        if part["table"] == "forwards":
            table = pq.read_table(file).drop_columns(["pass_id", "produced"])
            pq.write_table(table, file)
            part["sha256"] = file_sha256(file)
    (folder / "trace.json").write_text(json.dumps(data))


def test_version_0_is_read_and_migrated(tmp_path: Path) -> None:
    source = write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE), rows_per_part=60)
    new = load(source)
    make_version_0(source)
    old = load(source, verify=True)
    assert check(source).ok, check(source).lines()
    assert_same(old, new, but=("pass_id", "produced"))
    np.testing.assert_array_equal(old.forwards.pass_id, np.arange(old.num_forwards))
    np.testing.assert_array_equal(old.forwards.produced, old.forwards.accepted)
    assert old.manifest.ordered
    assert old.manifest.lacks == ()
    slice_trace(source, tmp_path / "s")
    assert json.loads((tmp_path / "s" / "trace.json").read_text())["schema_version"] == 1
    assert_same(load(tmp_path / "s"), old)
    merge_traces([source, tmp_path / "s"], tmp_path / "m")
    assert check(tmp_path / "m").ok


def test_a_present_version_may_not_lack_columns(tmp_path: Path) -> None:
    source = write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE))
    make_version_0(source)
    edit_manifest(source, lambda data: data.update(schema_version=1))
    with pytest.raises(TraceError, match="'ordered' is missing"):
        load(source)
    edit_manifest(source, lambda data: data.update(ordered=True, lacks=[]))
    with pytest.raises(TraceError, match=r"forwards-00000.parquet: column 'pass_id' is missing"):
        load(source)
    assert read_manifest(source).parts[0].version == 1
