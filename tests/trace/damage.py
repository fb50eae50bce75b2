"""Traces made wrong on purpose, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import edit_manifest

from oled.trace import TraceError, load
from oled.trace.check import Finding, Report, check
from oled.trace.files import file_sha256

Columns = dict[str, Any]


def refused(folder: Path, message: str, rule: str = "file") -> None:
    """load says so in one line, and check reports it."""
    with pytest.raises(TraceError, match=message) as refusal:
        load(folder)
    assert "\n" not in str(refusal.value)
    report = check(folder)
    assert rule in report.breaches, report.lines()


def rewrite(folder: Path, file: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """A part with other columns; the manifest agrees with it."""
    table = change(pq.read_table(folder / file))
    pq.write_table(table, folder / file)

    def follow(data: dict[str, Any]) -> None:
        for part in data["parts"]:
            if part["file"] == file:
                part.update(rows=table.num_rows, sha256=file_sha256(folder / file))

    edit_manifest(folder, follow)


def only(report: Report, rule: str) -> Finding:
    """The first finding, all of which are of this rule."""
    assert set(report.breaches) == {rule}, report.lines()
    assert not report.ok
    return report.findings[0]


def put(column: str, row: int, value: Any) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[column][row] = value

    return change
