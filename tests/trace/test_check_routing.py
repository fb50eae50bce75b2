"""Rules about routing rows and side tables: a valid trace, damaged, and the finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import Columns, only, put
from small import (
    diffusion,
    edit_manifest,
    edit_table,
    geometry,
    manifest,
    record,
    write,
)

from oled.trace import (
    Gap,
    Kept,
    Phase,
    Prediction,
    RouterScores,
    WeightKind,
)
from oled.trace.check import check

SHAPE = geometry()
ROUTING, FORWARDS, TOKENS = (
    f"{table}-00000.parquet" for table in ("routing", "forwards", "tokens")
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid trace of two requests; forward 0 is a prefill, 1 the first denoising step."""
    return write(tmp_path / "trace", manifest(SHAPE), diffusion(SHAPE))


@pytest.mark.parametrize(
    ("rule", "column", "value", "words"),
    [
        ("id_range", "expert_ids", [1, 8], "expert id 8, the layer has 0..7"),
        ("duplicates", "expert_ids", [3, 3], "expert 3 occurs twice"),
        ("no_expert", "expert_ids", [65535, 65535], "all slots are unused"),
        ("weight_finite", "weights", [float("nan"), 0.5], "weight nan of expert"),
        ("weight_finite", "weights", [1.5, -0.5], "weight -0.5 of expert"),
        ("weight_sum", "weights", [0.5, 0.51], "weights add up to 1.01, not 1"),
    ],
)
def test_routing(folder: Path, rule: str, column: str, value: list[Any], words: str) -> None:
    row = 12 + 4 + 2  # forward 1, layer 2, token 2
    edit_table(folder, ROUTING, put(column, row, value))
    finding = only(check(folder), rule)
    assert f"forward 1, token 2: {words}" in finding.message
    assert (finding.file, finding.row, finding.layer) == (ROUTING, row, 2)
    assert finding.value is not None
    assert finding.value in finding.message or rule == "no_expert"
    assert str(finding).startswith(f"{ROUTING}, row {row}, layer 2: ")


def test_g07_ids_of_zero_experts_need_a_declaration(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "t", manifest(geometry(zero_experts=2)), [record([[[1, 9]], [[8, 9]], [[0, 1]]])]
    )
    assert check(folder).ok
    edit_manifest(folder, lambda data: data["geometry"].update(zero_experts=0))
    report = check(folder)
    assert report.breaches == {"id_range": 2}
    assert [(f.row, f.layer, f.value) for f in report.findings] == [(0, 1, "9"), (1, 2, "8")]


@pytest.mark.parametrize("total", [0.9975, 1.0024])
def test_weight_sums_may_be_rounded_to_bf16(folder: Path, total: float) -> None:
    edit_table(folder, ROUTING, put("weights", 12, [0.5, total - 0.5]))
    assert check(folder).ok


def test_weight_sum_is_that_of_the_kind(tmp_path: Path) -> None:
    scaled = manifest(SHAPE, weight_kind=WeightKind.SCALED_SUM, weight_sum=2.5)
    finding = only(check(write(tmp_path / "a", scaled, diffusion(SHAPE))), "weight_sum")
    assert "not 2.5" in finding.message
    # G02: unnormalised weights, stored as they are
    free = manifest(geometry(layers=1), weight_kind=WeightKind.UNNORMALISED)
    one = record([[[0, 1]]], [[[0.4754, 0.1749]]])
    assert check(write(tmp_path / "b", free, [one])).ok
    # G01: sum 2.5, not 1
    scaled = manifest(geometry(layers=1), weight_kind=WeightKind.SCALED_SUM, weight_sum=2.5)
    one = record([[[6, 7]]], [[[1.2774, 1.2226]]])
    assert check(write(tmp_path / "c", scaled, [one])).ok


def test_rows_ascend(folder: Path) -> None:
    def swap(columns: Columns) -> None:
        for values in columns.values():
            values[3], values[4] = values[4], values[3]

    edit_table(folder, ROUTING, swap)
    finding = only(check(folder), "order")
    assert (finding.row, finding.layer) == (4, 1)


def test_rows_of_unknown_layers_and_forwards(folder: Path) -> None:
    edit_table(folder, ROUTING, put("layer", -1, 7))
    report = check(folder)
    assert set(report.breaches) == {"values", "rows_per_layer"}
    edit_table(folder, ROUTING, put("layer", -1, 3))
    edit_table(folder, ROUTING, put("forward", -1, 99))
    report = check(folder)
    assert set(report.breaches) == {"numbering", "rows_per_layer"}


def drop(forward: int, layer: int, tokens: tuple[int, ...]) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        kept = [
            place
            for place in range(len(columns["forward"]))
            if (columns["forward"][place], columns["layer"][place]) != (forward, layer)
            or columns["token"][place] not in tokens
        ]
        for name, values in columns.items():
            columns[name] = [values[place] for place in kept]

    return change


def test_rows_per_layer(folder: Path) -> None:
    edit_table(folder, ROUTING, drop(1, 2, (3,)))
    finding = only(check(folder), "rows_per_layer")
    assert (finding.file, finding.layer, finding.value) == (ROUTING, 2, "3")
    assert "forward 1: 3 rows for 4 tokens" in finding.message


@pytest.mark.parametrize(
    ("kept", "dropped", "ok"),
    [
        (Kept.LAST_TOKEN, (0, 1, 2), True),
        (Kept.LAST_TOKEN, (0, 1, 3), False),  # one row, but of token 2
        (Kept.LAST_TOKEN, (), False),
        (Kept.NONE, (0, 1, 2, 3), True),
        (Kept.NONE, (0,), False),
        (Kept.SOME, (1,), True),
    ],
)
def test_declared_gaps(tmp_path: Path, kept: Kept, dropped: tuple[int, ...], ok: bool) -> None:
    about = manifest(SHAPE, gaps=(Gap(3, Phase.PREFILL, kept, "pruned"),))
    records = diffusion(SHAPE)
    folder = write(tmp_path / "t", about, records)
    for forward, one in enumerate(records):
        if one.phase is Phase.PREFILL:
            edit_table(folder, ROUTING, drop(forward, 3, dropped))
    report = check(folder)
    assert report.ok == ok, report.lines()
    assert any("declared gap: layer 3" in note for note in report.notes)


def test_zero_capture(folder: Path) -> None:
    def blank(columns: Columns) -> None:
        for place, layer in enumerate(columns["layer"]):
            if layer == 2:
                columns["expert_ids"][place] = [0, 65535]
                columns["weights"][place] = [0.0, 0.0]

    edit_table(folder, ROUTING, blank)
    report = check(folder)
    assert report.breaches["zero_capture"] == 1
    finding = next(one for one in report.findings if one.rule == "zero_capture")
    assert finding.layer == 2


# --- side tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "column", "value", "words"),
    [
        ("scores", "expert_ids", [1, 9], "score of expert 9, the layer has 0..7"),
        ("scores", "values", [1.0, float("inf")], "is not finite"),
        ("predictions", "target", 7, "layer 7 is no MoE layer"),
        ("predictions", "expert_ids", [1, 8], "above the 8 experts of layer 2"),
        ("predictions", "expert_ids", [1], "ids and scores differ in number"),
        ("predictions", "scores", [1.0, float("nan")], "a score is not finite"),
    ],
)
def test_side_tables(tmp_path: Path, file: str, column: str, value: Any, words: str) -> None:
    ids = np.array([[[1, 2]]] * 3)
    said = (Prediction("gate", 1, 2, np.array([1, 2]), np.array([2.0, 1.0])),)
    one = record(ids, predictions=said, scores=RouterScores(ids, np.ones(ids.shape)))
    folder = write(tmp_path / "t", manifest(SHAPE), [one])
    assert check(folder).ok
    edit_table(folder, f"{file}-00000.parquet", put(column, 0, value))
    finding = only(check(folder), "side_tables")
    assert words in finding.message


# --- reports --------------------------------------------------------------------------------------


def test_many_breaches_are_counted_and_a_few_are_shown(folder: Path) -> None:
    def all_wrong(columns: Columns) -> None:
        columns["weights"] = [[0.5, 0.6]] * len(columns["weights"])

    edit_table(folder, ROUTING, all_wrong)
    report = check(folder)
    assert report.breaches == {"weight_sum": report.routing_rows}
    assert len(report.findings) == 5
    assert f"… and {report.routing_rows - 5} more [weight_sum]" in report.lines()


def test_parts_are_named_across_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE), rows_per_part=24)
    edit_table(folder, "routing-00001.parquet", put("expert_ids", 5, [4, 4]))
    finding = only(check(folder), "duplicates")
    assert (finding.file, finding.row) == ("routing-00001.parquet", 5)
    edit_table(folder, "routing-00001.parquet", put("expert_ids", 5, [4, 5]))
    edit_table(folder, "tokens-00001.parquet", put("state", 2, 9))
    report = check(folder)
    finding = next(one for one in report.findings if one.rule == "values")
    assert (finding.file, finding.row) == ("tokens-00001.parquet", 2)
