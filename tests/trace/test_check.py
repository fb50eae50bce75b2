"""One test per rule: a valid trace, damaged, and the finding that names the damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from damage import Columns, only, put
from small import (
    DECODED,
    diffusion,
    edit_manifest,
    edit_table,
    geometry,
    manifest,
    write,
)

from oled.trace import (
    ConfidenceKind,
    Phase,
)
from oled.trace.check import RULES, check

SHAPE = geometry()
ROUTING, FORWARDS, TOKENS = (
    f"{table}-00000.parquet" for table in ("routing", "forwards", "tokens")
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid trace of two requests; forward 0 is a prefill, 1 the first denoising step."""
    return write(tmp_path / "trace", manifest(SHAPE), diffusion(SHAPE))


def test_a_valid_trace_is_whole(folder: Path) -> None:
    report = check(folder)
    assert report.ok
    assert report.lines()[-1].endswith("whole")
    assert report.routing_rows == 3 * report.tokens
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_every_rule_has_a_test() -> None:
    files = ("test_check.py", "test_check_routing.py", "test_trace_files.py")
    source = "".join(Path(__file__).with_name(file).read_text() for file in files)
    for rule in RULES:
        assert f'"{rule}"' in source, rule


# --- manifest and files ---------------------------------------------------------------------------


def test_manifest(folder: Path) -> None:
    edit_manifest(folder, lambda data: data.pop("weight_kind"))
    finding = only(check(folder), "manifest")
    assert "'weight_kind' is missing" in finding.message


def test_complete(folder: Path) -> None:
    edit_manifest(folder, lambda data: data.update(status="partial"))
    assert "everything from forward" in only(check(folder), "complete").message


def test_file_missing(folder: Path) -> None:
    (folder / ROUTING).unlink()
    assert only(check(folder), "file").file == ROUTING


def test_file_truncated(folder: Path) -> None:
    (folder / ROUTING).write_bytes((folder / ROUTING).read_bytes()[:-100])
    assert "not readable as Parquet" in only(check(folder), "file").message


def test_file_rows(folder: Path) -> None:
    edit_manifest(folder, lambda data: data["parts"][2].update(rows=7))
    assert "the manifest says 7" in only(check(folder), "file").message


def test_table_unlisted(folder: Path) -> None:
    edit_manifest(folder, lambda data: data["parts"].pop())
    assert "no part of table 'routing'" in only(check(folder), "file").message


def test_checksum(folder: Path) -> None:
    edit_table(folder, TOKENS, put("token_id", 3, 5), checksum=False)
    assert only(check(folder), "checksum").file == TOKENS


# --- forwards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "column", "row", "value", "words"),
    [
        ("numbering", "forward", 2, 9, "forward 9 is not the row's number"),
        ("values", "phase", 2, 9, "phase 9 is unknown"),
        ("values", "step", 1, -5, "step -5 must be -1"),
        ("values", "context", 1, -5, "context -5 must not be negative"),
        ("order", "pass_id", 3, 0, "pass_id 0 is smaller than the pass before"),
        ("order", "pass_id", 3, 2, "has two forwards in one pass"),
        ("order", "step", 2, 0, "step 0 does not follow the step before"),
        ("accepted", "produced", 1, 5, "produced 5 makes more than were accepted"),
    ],
)
def test_forwards(folder: Path, rule: str, column: str, row: int, value: int, words: str) -> None:
    edit_table(folder, FORWARDS, put(column, row, value))
    finding = only(check(folder), rule)
    assert words in finding.message
    assert (finding.file, finding.row) == (FORWARDS, row)


def test_blocks_ascend_and_stay_closed(folder: Path) -> None:
    commit = next(
        place
        for place, one in enumerate(diffusion(SHAPE))
        if one.phase is Phase.COMMIT and one.block == 0
    )

    def earlier(columns: Columns) -> None:
        columns["block"][commit] = 5

    def swap(columns: Columns) -> None:
        columns["phase"][commit - 1 : commit + 1] = [Phase.COMMIT, Phase.DENOISE]
        columns["step"][commit - 1 : commit + 1] = [-1, 9]

    edit_table(folder, FORWARDS, earlier)
    finding = only(check(folder), "order")
    assert finding.row == commit + 1
    assert "comes after a later block" in finding.message
    edit_table(folder, FORWARDS, put("block", commit, 0))
    edit_table(folder, FORWARDS, swap)
    report = check(folder)
    assert "is denoised after its commit" in report.findings[0].message


def test_a_trace_without_order_need_not_ascend(folder: Path) -> None:
    edit_table(folder, FORWARDS, put("pass_id", 3, 0))
    edit_manifest(folder, lambda data: data.update(ordered=False))
    assert check(folder).ok


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "column", "row", "value", "words"),
    [
        ("numbering", "forward", 5, 7, "forward 7 is not the row's forward"),
        ("numbering", "token", 5, 3, "token 3 is not the row's place"),
        ("numbering", "request", 5, 1, "request 1 is not the forward's"),
        ("values", "state", 6, 4, "state 4 is unknown"),
        ("values", "token_id", 5, -2, "token_id -2 must be -1"),
        ("order", "position", 6, 5, "position 5 does not come after"),
        ("confidence", "confidence", 5, float("nan"), "confidence nan of a generated token"),
        ("confidence", "confidence", 5, 1.5, "confidence 1.5 is not in 0..1"),
        ("confidence", "confidence", 5, float("inf"), "confidence inf is not in 0..1"),
    ],
)
def test_tokens(folder: Path, rule: str, column: str, row: int, value: Any, words: str) -> None:
    edit_table(folder, TOKENS, put(column, row, value))
    finding = only(check(folder), rule)
    assert f"forward 1, token {row - 4}: {words}" in finding.message
    assert (finding.file, finding.row) == (TOKENS, row)


def test_tokens_of_a_forward_are_missing(folder: Path) -> None:
    edit_table(folder, TOKENS, lambda columns: [values.pop() for values in columns.values()])
    assert "the forwards add up to" in only(check(folder), "numbering").message


def test_accepted_flags_add_up(folder: Path) -> None:
    edit_table(folder, FORWARDS, put("accepted", 1, 4))
    finding = only(check(folder), "accepted")
    assert "flagged as accepted, the forward says 4" in finding.message
    assert (finding.file, finding.row) == (TOKENS, 4)


def test_only_masked_tokens_are_accepted(folder: Path) -> None:
    def open_before(columns: Columns) -> None:
        for row in range(4, 8):
            columns["state"][row] = int(DECODED)

    edit_table(folder, TOKENS, open_before)
    assert "although the token was not masked" in only(check(folder), "accepted").message


def test_no_confidence_where_the_manifest_says_none(folder: Path) -> None:
    edit_manifest(folder, lambda data: data.update(confidence_kind=ConfidenceKind.NONE.value))
    assert "where the manifest says none" in only(check(folder), "confidence").message
