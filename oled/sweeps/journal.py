"""What a sweep has done so far, in its folder: the declaration, and one line a finished row.

A row is appended when it is done, so an interrupted sweep keeps it; a line torn by a crash is
left out when the journal is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oled.errors import UserError
from oled.results.table import TABLE, write_json

DECLARATION, ROWS = "sweep.json", "rows.jsonl"

Row = dict[str, Any]


class Journal:
    """The rows of one sweep by their digest."""

    def __init__(self, folder: Path, declaration: Mapping[str, Any], *, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / ROWS
        self.done: dict[str, Row] = {}
        if resume and (folder / DECLARATION).is_file():
            _refuse_another(folder, declaration)
            self.done = self._read()
        else:  # an older sweep's rows never stand among these
            for name in (TABLE, ROWS, DECLARATION):
                (folder / name).unlink(missing_ok=True)
        write_json(folder / DECLARATION, declaration)
        text = "".join(json.dumps(row) + "\n" for row in self.done.values())
        self._file.write_text(text, encoding="utf-8")  # without torn and failed rows

    def append(self, row: Row) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _read(self) -> dict[str, Row]:
        """The rows that did not fail."""
        if not self._file.is_file():
            return {}
        rows: dict[str, Row] = {}
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["error"] is None:
                rows[row["digest"]] = row
        return rows


def _refuse_another(folder: Path, declaration: Mapping[str, Any]) -> None:
    before = json.loads((folder / DECLARATION).read_text(encoding="utf-8"))
    for part, what in (("base", "base configuration"), ("traces", "hash of a trace")):
        old, new = before[part], json.loads(json.dumps(declaration[part], default=str))
        for key in sorted({*old, *new}):
            if part == "traces" and not (key in old and key in new):
                continue  # another trace may be added
            if old.get(key) != new.get(key):
                raise UserError(
                    f"{folder}: the {what} has changed: {key} was {old.get(key)}, is "
                    f"{new.get(key)}; choose another out=DIR, or begin anew without resume=true"
                )
