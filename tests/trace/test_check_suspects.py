"""Warnings of `check` where no rule is broken, and steps without experts, which are no fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import diffusion, edit_manifest, geometry, manifest, record, routes, write

from oled.trace import ForwardRecord, TraceWriter, WeightKind, load
from oled.trace.check import check
from oled.trace.cut import slice_trace
from oled.trace.exporters import EXPORTERS, export_trace
from oled.trace.merge import merge_traces
from oled.trace.schema import NO_EXPERT
from oled.trace.stats import locality, locality_lines
from oled.trace.steps import build_steps
from oled.trace.view import present, view
from tests.support.seeds import seeds

SHAPE = geometry(16, layers=3, top_k=2)


def decoding(forwards: int, *, seed: int = 0, shape: Any = SHAPE, tokens: int = 1) -> list[Any]:
    """Forwards of request 0 with random routes."""
    rng = np.random.default_rng(seed)
    return [
        record(*routes(rng, shape, tokens), pass_id=place, positions=10 * place + np.arange(tokens))
        for place in range(forwards)
    ]


def repeated(records: list[Any], first: int, length: int) -> list[Any]:
    """The same records, `length` forwards from `first` on with the ids of the first of them."""
    ids = records[first].expert_ids
    return [
        replace(one, expert_ids=ids.copy()) if first <= place < first + length else one
        for place, one in enumerate(records)
    ]


def test_a_repeated_capture_is_seen(tmp_path: Path) -> None:
    records = repeated(decoding(30), 12, 9)
    report = check(write(tmp_path / "t", manifest(SHAPE), records))
    assert report.ok
    (warning,) = report.warnings
    assert warning.startswith("forwards 12 to 20 of request 0: 9 forwards in a row have the same")
    assert report.lines()[-2] == f"warning: {warning}"
    assert report.lines()[-1].endswith("whole, but look at 1 warning first")
    assert report.to_json()["warnings"] == [warning]


def test_a_repeated_capture_is_seen_across_row_groups_and_in_a_batch(tmp_path: Path) -> None:
    """Two requests take turns; each of them repeats its own ids."""
    both = [repeated(decoding(20, seed=seed, tokens=3), 5, 10) for seed in (1, 2)]
    records = [
        replace(one, request=request)
        for pair in zip(*both, strict=True)
        for request, one in enumerate(pair)
    ]
    report = check(write(tmp_path / "t", manifest(SHAPE), records, rows_per_group=7))
    assert [text.split(":")[0] for text in report.warnings] == [
        "forwards 10 to 28 of request 0",
        "forwards 11 to 29 of request 1",
    ]


def test_repeats_in_some_layers_and_short_ones_are_silent(tmp_path: Path) -> None:
    some = decoding(30)
    for one in some[5:25]:
        one.expert_ids[:2] = some[4].expert_ids[:2]
    assert not check(write(tmp_path / "some", manifest(SHAPE), some)).warnings
    short = repeated(decoding(30), 3, 5)
    assert not check(write(tmp_path / "short", manifest(SHAPE), short)).warnings
    # two experts in one layer agree often by chance
    coin = geometry(2, layers=1, top_k=1)
    tosses = repeated(decoding(30, shape=coin), 3, 9)
    assert not check(write(tmp_path / "coin", manifest(coin), tosses)).warnings
    # where all experts are chosen, ids say nothing
    every = geometry(2, layers=3, top_k=2)
    alike = repeated(decoding(60, shape=every), 0, 60)
    assert not check(write(tmp_path / "every", manifest(every), alike)).warnings


@pytest.mark.parametrize("seed", seeds(3))
def test_random_routes_are_silent(tmp_path: Path, seed: int) -> None:
    records = diffusion(SHAPE, requests=3, seed=seed)
    assert not check(write(tmp_path / "t", manifest(SHAPE), records)).warnings


def test_a_column_of_one_id(tmp_path: Path) -> None:
    records = decoding(20, tokens=2)
    for one in records:
        one.expert_ids[1, :, 1] = 7
        one.expert_ids[1, :, 0] %= 7
    report = check(write(tmp_path / "t", manifest(SHAPE), records))
    (warning,) = report.warnings
    assert warning.startswith("expert 7 is in all 40 rows of layer 2, always in slot 1: ")


def test_one_id_in_every_row(tmp_path: Path) -> None:
    shape = geometry(16, layers=3, top_k=1)
    records = decoding(40, shape=shape)
    for one in records:
        one.expert_ids[:] = 3
    report = check(write(tmp_path / "t", manifest(shape), records))
    assert report.warnings[0].startswith("forwards 0 to 39 of request 0: 40 forwards in a row")
    assert report.warnings[1].startswith(
        "expert 3 is in all 120 rows of all 3 layers, always in slot 0: "
    )


def test_an_always_active_expert_is_seen_in_any_slot(tmp_path: Path) -> None:
    """A shared expert with the last id, sorted among the routed ones by weight."""
    shape = geometry(17, layers=3, top_k=3)
    rng = np.random.default_rng(0)
    records = decoding(20, shape=geometry(16, layers=3, top_k=2), tokens=2)
    records = [
        record(
            rng.permuted(np.concatenate([one.expert_ids, np.full((3, 2, 1), 16)], axis=2), axis=2),
            pass_id=one.pass_id,
            positions=one.positions,
        )
        for one in records
    ]
    report = check(write(tmp_path / "t", manifest(shape), records, rows_per_group=9))
    (warning,) = report.warnings
    assert warning.startswith("expert 16 is in all 120 rows of all 3 layers: a shared expert")


# --- steps without experts ------------------------------------------------------------------------


def padded() -> list[ForwardRecord]:
    """Decoding in which some tokens are routed nowhere: rows of -1, as padding is captured."""
    records = decoding(8, tokens=3)
    for place, one in enumerate(records):
        one.expert_ids[place % 3, place % 2] = NO_EXPERT
        one.weights[place % 3, place % 2] = 0
    records[4].expert_ids[:] = NO_EXPERT
    records[4].weights[:] = 0
    return records


def nowhere() -> list[ForwardRecord]:
    """A trace without a single access."""
    return [
        replace(
            one, expert_ids=np.full_like(one.expert_ids, NO_EXPERT), weights=np.zeros((3, 3, 2))
        )
        for one in decoding(4, tokens=3)
    ]


def test_rows_without_experts_are_no_fault(tmp_path: Path) -> None:
    report = check(write(tmp_path / "t", manifest(SHAPE), padded()))
    assert report.ok, report.lines()
    assert not report.warnings
    assert report.notes == ("16 rows name no expert: tokens that were routed nowhere",)
    bare = manifest(SHAPE, weight_kind=WeightKind.NONE)
    assert check(write(tmp_path / "bare", bare, padded())).ok


def test_weights_without_experts_are_a_fault(tmp_path: Path) -> None:
    records = padded()
    records[4].weights[1, 2] = 0.5
    report = check(write(tmp_path / "t", manifest(SHAPE), records))
    assert report.breaches == {"no_expert": 1}
    assert "forward 4, token 2: all slots are unused" in str(report.findings[0])


def test_a_layer_without_any_expert_is_suspicious(tmp_path: Path) -> None:
    records = decoding(8)
    for one in records:
        one.expert_ids[1] = NO_EXPERT
        one.weights[1] = 0
    report = check(write(tmp_path / "t", manifest(SHAPE), records))
    assert report.ok
    assert report.warnings == ("no row of layer 2 names an expert: was its router captured?",)


@pytest.mark.parametrize("records", [padded, nowhere])
def test_everything_reads_and_writes_steps_without_experts(tmp_path: Path, records: Any) -> None:
    folder = write(tmp_path / "t", manifest(SHAPE), records())
    trace = load(folder, verify=True)
    assert check(folder).ok
    build_steps(trace)
    assert locality_lines(locality(trace))
    for table in present(folder):
        view(folder, table)
    for name in EXPORTERS:
        assert export_trace(name, folder, tmp_path / name).stat().st_size >= 0
    export_trace("oracle_general", folder, tmp_path / "token", {"access": "token"})
    assert check(slice_trace(folder, tmp_path / "s", forwards=[4] if records is padded else [1])).ok
    assert check(merge_traces([folder, folder], tmp_path / "m")).ok


# --- partial traces -------------------------------------------------------------------------------


def partial(folder: Path, prompts: int, batch: int = 1) -> Path:
    def change(data: dict[str, Any]) -> None:
        data["status"] = "partial"
        data["prompts"] = [{"hash": str(place), "source": "p"} for place in range(prompts)]
        data["decode"]["batch_size"] = batch

    edit_manifest(folder, change)
    return folder


def test_a_partial_trace_says_of_how_many_requests(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE, requests=3))
    report = check(partial(folder, prompts=7))
    (finding,) = report.findings
    assert "3 of 7 planned requests (the last may be cut off)" in finding.message
    assert (report.requests, report.planned_requests) == (3, 7)
    assert "partial, 3 of 7 requests, " in report.lines()[-1]
    with pytest.raises(ValueError, match="3 of 7 planned requests"):
        load(folder)
    assert "the last 2 may be cut off" in str(check(partial(folder, 7, batch=2)).findings[0])
    assert "3 requests (the last" in str(check(partial(folder, 0)).findings[0])


def test_a_partial_trace_of_no_request(tmp_path: Path) -> None:
    about = manifest(SHAPE, prompts=({"hash": "x", "source": "p"},) * 4)
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / "t", about):
        raise RuntimeError("out of memory")
    assert "none of 4 planned requests" in str(check(tmp_path / "t").findings[0])
