"""Read a table of measurements: what a prediction may use, and apart from it what was measured.

Three forms, told by their columns: the bench (`measured.csv` with `hosts.csv`), users' reports
(`users.csv`) and published tables (`published.csv`).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oled.errors import UserError

Form = Literal["bench", "users", "published"]
Facts = Mapping[str, str]

MEASURED: dict[Form, tuple[str, str]] = {
    "bench": ("ms_per_token", "ms"),
    "users": ("decode_tps", "tok/s"),
    "published": ("value", ""),  # the row has its unit
}
NEEDED: dict[Form, tuple[str, ...]] = {
    "bench": ("id", "host", "model", "policy", "moe_layers", "top_k", "bytes_per_expert"),
    "users": ("id", "group", "model", "software", "gpu", "experts_on_gpu", "experts_elsewhere"),
    "published": ("id", "group", "model", "system", "gpu", "metric", "unit", "budget"),
}
HIDDEN = (
    "ms_per_token",
    "tok_s",
    "spread_pct",
    "their_pred_ms",
    "their_pred_tok_s",
    "their_time_err_pct",
    "decode_tps",
    "prefill_tps",
    "value",
    "note",
)
"""Columns that no prediction sees: measurements, others' predictions, and notes that quote both."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; `facts` holds the row's columns without the hidden ones, and its host's."""

    id: str
    group: str
    form: Form
    facts: Facts
    measured: float | None
    unit: str


def read_rows(table: Path, hosts: Path | None = None) -> list[Row]:
    """Return the rows of a table in one of the three forms.

    Raises: UserError where a file lacks columns, an id stands twice, a host is not in `hosts`, or a
    measured value is no number.
    """
    rows = _read(table)
    if not rows:
        raise UserError(f"{table}: has no rows")
    form = _form(table, rows[0])
    known = {} if hosts is None else {row.get("host", ""): row for row in _read(hosts)}
    seen: set[str] = set()
    found = []
    for line, row in enumerate(rows, start=2):
        name = row["id"]
        if not name or name in seen:
            raise UserError(f"{table}, line {line}: id '{name}' is empty or stands twice")
        seen.add(name)
        found.append(_row(table, line, form, row, known if hosts is not None else None))
    return found


def _read(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    with file.open(encoding="utf-8", newline="") as text:
        try:
            return [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(text)]
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{file}: is no CSV text: {error}") from error


def _form(table: Path, row: Facts) -> Form:
    for form, needed in NEEDED.items():
        if all(name in row for name in needed):
            return form
    lacking = min(
        ([name for name in needed if name not in row] for needed in NEEDED.values()), key=len
    )
    raise UserError(
        f"{table}: has the columns of none of the forms bench, users, published; nearest to one of "
        f"them it lacks {', '.join(lacking)}"
    )


def _row(table: Path, line: int, form: Form, row: Facts, hosts: Mapping[str, Facts] | None) -> Row:
    column, unit = MEASURED[form]
    text = row.get(column, "")
    try:
        measured = float(text) if text else None
    except ValueError:
        raise UserError(f"{table}, line {line}: {column} is '{text}', not a number") from None
    facts = _without(row.items())
    for word in ("STREAM", "expert kernel"):  # all of a note that a prediction may know
        if word in row.get("note", ""):
            facts["host_bw_by"] = word
    if form == "bench":
        if hosts is not None and row["host"] not in hosts:
            raise UserError(f"{table}, line {line}: host '{row['host']}' is not in the hosts table")
        if hosts is not None:
            own = {name: text for name, text in row.items() if text}
            facts = _without({**hosts[row["host"]], **own}.items())
    group = row["host"] if form == "bench" else row["group"]
    return Row(row["id"], group, form, facts, measured, unit or row["unit"])


def _without(items: Iterable[tuple[str, str]]) -> defaultdict[str, str]:
    """Return what a prediction may see; a column that a table lacks is empty."""
    return defaultdict(str, {name: text for name, text in items if name not in HIDDEN})


class UnpredictableError(Exception):
    """Says why a row cannot be predicted."""


def number(facts: Facts, column: str) -> float | None:
    """Return a column's number, None where it is empty or missing.

    Raises: UnpredictableError where it is something else.
    """
    text = facts.get(column, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise UnpredictableError(f"{column} is '{text}', not a number") from None


def needed(facts: Facts, column: str) -> float:
    """Return a column's number.

    Raises: UnpredictableError where there is none above 0.
    """
    found = number(facts, column)
    if found is None:
        raise UnpredictableError(f"{column} is not stated")
    if found <= 0:
        raise UnpredictableError(f"{column} is '{facts[column]}', not a number above 0")
    return found
