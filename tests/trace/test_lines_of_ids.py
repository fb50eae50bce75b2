"""Headerless CSV of expert ids, and JSONL of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sources import FACTS, write_lines

from oled.trace import NO_EXPERT, Kept, Phase, Trace, TraceError, WeightKind, load
from oled.trace.check import check
from oled.trace.importers import import_trace, read_source


def imported(name: str, source: Path, options: dict[str, Any]) -> Trace:
    folder = source.parent / "trace"
    trace = load(import_trace(name, source, folder, {**FACTS, **options}))
    report = check(folder)
    assert report.ok, report.lines()
    return trace


def csv(folder: Path, text: str) -> Path:
    (folder / "t.csv").write_text(text)
    return folder / "t.csv"


# --- headerless CSV: two tokens in layers 4 and 6 ---------------------------------------------

ROUTES = [[[0, 1], [2, 3]], [[4, 5], [7, 6]]]


@pytest.mark.parametrize(
    ("text", "options", "positions", "lacking"),
    [
        (
            "4,0,0,1\n6,0,2,3\n4,9,4,5\n6,9,7,6\n",
            {"layer_column": 0, "token_column": 1},
            [0, 9],
            (),
        ),
        (
            "9,4,4,5\n9,6,7,6\n0,6,2,3\n0,4,0,1\n",
            {"layer_column": 1, "token_column": 0},
            [0, 9],
            (),
        ),
        ("4,0,1\n6,2,3\n4,4,5\n6,7,6\n", {"layer_column": 0}, [0, 1], ("positions",)),
        ("0 1\n2 3\n4 5\n7 6\n", {"moe_layers": "4,6", "layers": 8}, [0, 1], ("positions",)),
        (
            "0;1;5\n2;3;5\n4;5;8\n7;6;8\n",
            {"moe_layers": "4,6", "layers": 8, "token_column": 2},
            [5, 8],
            (),
        ),
        (
            "4\t33\t0\t1\n6\t33\t2\t3\n4\t44\t4\t5\n6\t44\t7\t6\n",
            {"layer_column": 0, "id_columns": "2-3"},
            [0, 1],
            ("positions",),
        ),
    ],
)
def test_columns_are_what_the_user_says(
    tmp_path: Path,
    text: str,
    options: dict[str, Any],
    positions: list[int],
    lacking: tuple[str, ...],
) -> None:
    trace = imported("plain_csv", csv(tmp_path, text), options)
    assert trace.geometry.moe_layers == (4, 6)
    assert trace.routing.expert_ids.tolist() == [row for token in ROUTES for row in token]
    assert trace.tokens.position.tolist() == positions
    known = {"weights", "confidence", "requests", "phases", "token_ids"}
    assert set(trace.manifest.lacks) == known | set(lacking)


def test_layers_that_are_counted_are_said_to_be(tmp_path: Path) -> None:
    trace = imported("plain_csv", csv(tmp_path, "0,0,1\n0,2,3\n"), {"token_column": 0})
    assert trace.geometry.moe_layers == (0, 1)
    assert "layers" in trace.manifest.lacks


def test_unused_slots_and_declared_gaps(tmp_path: Path) -> None:
    file = csv(tmp_path, "0,0,1,-1\n1,0,2,3\n0,1,4,5\n")
    columns = {"layer_column": 0, "token_column": 1}
    with pytest.raises(TraceError, match="token 1 has no line of layer 1: cut off"):
        read_source("plain_csv", file, FACTS | columns)
    trace = imported("plain_csv", file, {**columns, "gaps": "true"})
    assert trace.routing.expert_ids[0].tolist() == [1, NO_EXPERT]
    assert [(gap.layer, gap.kept) for gap in trace.manifest.gaps] == [(1, Kept.SOME)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "line 1: '' is not a line of whole numbers"),
        ("layer,a,b\n0,1,2\n", {}, "line 1: 'layer,a,b' is not a line .* no header"),
        ("0.5,1\n", {}, "line 1: '0.5,1' is not a line of whole numbers"),
        ("0,1\n2,x\n", {"layers": 1}, "not readable as lines of whole numbers .*'x'"),
        ("0,1\n2\n", {"layers": 1}, "not readable as lines of whole numbers .*Expected 2 columns"),
        ("0,1\n2,\n", {"layers": 1}, "line 2: column 1 is empty"),
        ("0,1\n2,3\n", {}, "which line is of which layer"),
        ("0,1\n2,3\n4,5\n", {"layers": 2}, "3 lines are no tokens of 2 layers: cut off"),
        ("0,1\n2,3\n", {"layer_column": 2}, "column 2 was named; a line has 0 to 1"),
        ("0,1\n", {"layer_column": 0, "token_column": 0}, "column 0 is named for two things"),
        ("0,1\n", {"layer_column": 0, "id_columns": "0-1"}, "column 0 is named for two things"),
        ("0,1\n", {"layer_column": 0, "token_column": 1}, "no column is left for expert ids"),
        ("0,1,2\n0,3,3\n", {"layer_column": 0}, r"row 2: ids \[3, 3\] name an expert twice"),
        ("0,1,2\n0,-1,-1\n", {"layer_column": 0}, "row 2: ids .* name no expert"),
        ("0,1,2\n0,-2,1\n", {"layer_column": 0}, "row 2: column 1: expert -2 is neither -1 nor in"),
        ("0,1,2\n0,1,65535\n", {"layer_column": 0}, "row 2: column 2: expert 65535"),
        ("0,1,2\n70000,1,3\n", {"layer_column": 0}, r"row 2: layer 70000 is not in 0..65535"),
        ("0,1,2\n-4,1,3\n", {"token_column": 0, "layers": 1}, "row 2: token -4 is not in"),
        (
            "0,1,2\n0,1,3\n1,1,2\n",
            {"token_column": 0},
            "row 3: token 1 has 1 lines, the first token",
        ),
        ("0,0,1,2\n0,0,1,3\n", {"layer_column": 0, "token_column": 1}, "two lines for layer 0"),
    ],
)
def test_csv_refusals(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as error:
        read_source("plain_csv", csv(tmp_path, text), FACTS | options)
    assert "\n" not in str(error.value)


# --- batches ------------------------------------------------------------------------------------


def batch(layer: Any, number: Any, experts: Any, **more: Any) -> dict[str, Any]:
    found = {"layer": layer, "batch_id": number, "topk_experts": experts, **more}
    return {key: value for key, value in found.items() if value is not None}


BATCHES = [
    batch(2, 12, [[3, 7], [2, 5]]),
    batch(4, 12, [[1, 0], [6, 7]]),
    batch(2, 3, [4, 5]),
    batch(4, 3, [[5, 4]]),
]


def test_a_batch_is_a_forward(tmp_path: Path) -> None:
    trace = imported("topk_experts", write_lines(tmp_path / "t.jsonl", BATCHES), {})
    assert trace.geometry.moe_layers == (2, 4)
    assert trace.forwards.tokens.tolist() == [2, 1]
    assert set(trace.forwards.phase) == {Phase.DECODE}
    rows = [[3, 7], [2, 5], [1, 0], [6, 7], [4, 5], [5, 4]]
    assert trace.routing.expert_ids.tolist() == rows
    lacking = {"weights", "requests", "confidence", "phases", "token_ids", "positions"}
    assert set(trace.manifest.lacks) == lacking


def test_layer_by_layer_and_without_batch_ids_it_is_the_same(tmp_path: Path) -> None:
    by_layer = [BATCHES[at] for at in (0, 2, 1, 3)]
    bare = [{key: one[key] for key in ("layer", "topk_experts")} for one in BATCHES]
    hashes = []
    for number, lines in enumerate((BATCHES, by_layer, bare)):
        (folder := tmp_path / str(number)).mkdir()
        trace = imported("topk_experts", write_lines(folder / "t.jsonl", lines), {})
        hashes.append((trace.routing.expert_ids.tolist(), trace.forwards.tokens.tolist()))
    assert hashes[0] == hashes[1] == hashes[2]


def test_requests_and_weights_are_kept(tmp_path: Path) -> None:
    lines = [
        batch(0, step, [[step, 7]], request_id=name, topk_weights=[[0.75, 0.25]])
        for step, name in enumerate("aba")
    ]
    trace = imported("topk_experts", write_lines(tmp_path / "t.jsonl", lines), {})
    assert trace.forwards.request.tolist() == [0, 1, 0]
    assert trace.forwards.context.tolist() == [0, 0, 1]
    assert trace.manifest.weight_kind is WeightKind.SUM_ONE
    assert trace.routing.weights[0].tolist() == [0.75, 0.25]
    assert "requests" not in trace.manifest.lacks
    assert "passes" in trace.manifest.lacks


def test_a_layer_that_a_batch_lacks(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", BATCHES[:3])
    with pytest.raises(TraceError, match="batch 3 has no line of layer 4: cut off"):
        read_source("topk_experts", file, FACTS)
    trace = imported("topk_experts", file, {"gaps": "true"})
    assert [(gap.layer, gap.kept) for gap in trace.manifest.gaps] == [(4, Kept.SOME)]


ONE = [batch(0, 0, [[1, 2]])]
SHARE = {"topk_weights": [[0.5, 0.5]]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no lines"),
        ([7], "line 1: expected a JSON object"),
        ([{"layer": 0}], "line 1: 'topk_experts' is missing"),
        ([batch("a", 0, [[1]])], "line 1: 'layer' must be int"),
        ([batch(-1, 0, [[1]])], "line 1: layer -1 is not in 0..65535"),
        ([batch(0, 0, [])], "line 1: topk_experts must hold whole numbers"),
        ([batch(0, 0, [[]])], "line 1: topk_experts must hold whole numbers"),
        ([batch(0, 0, [[1], [2, 3]])], "line 1: the lists of topk_experts differ in length"),
        ([batch(0, 0, [[0.5]])], "line 1: topk_experts must hold whole numbers"),
        ([batch(0, 0, [[10**30]])], "line 1: topk_experts must hold whole numbers"),
        ([batch(0, 0, [[1, 2], [3, 3]])], r"layer 0, token 1: \[3, 3\] are not ids of different"),
        ([batch(0, 0, [[1, -1]])], r"token 0: \[1, -1\] are not ids"),
        ([batch(0, 0, [[1, 65535]])], "token 0: .* are not ids"),
        ([batch(0, [1], [[1, 2]])], r"batch_id \[1\] is no number and no name"),
        ([*ONE, *ONE], "line 2: batch 0 has layer 0 twice"),
        (
            [*ONE, batch(1, 0, [[1, 2], [3, 4]])],
            "line 2: topk_experts .* has 1 tokens of 2 experts",
        ),
        ([*ONE, batch(0, 1, [[1, 2, 3]])], "line 2: topk_experts .* of 2 experts"),
        ([*ONE, batch(1, None, [[1, 2]])], "line 2: some lines have batch_id and others do not"),
        ([*ONE, batch(1, 0, [[1, 2]], **SHARE)], "line 2: some lines have topk_weights"),
        ([batch(0, 0, [[1, 2]], topk_weights=[[1]])], "differ in shape"),
        ([batch(0, 0, [[1, 2]], topk_weights=[[1, -1]])], "negative or not finite"),
        ([batch(0, 0, [[1, 2]], topk_weights=[["a", "b"]])], "topk_weights must hold numbers"),
    ],
)
def test_batch_refusals(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as error:
        read_source("topk_experts", write_lines(tmp_path / "t.jsonl", lines), FACTS)
    assert "\n" not in str(error.value)
