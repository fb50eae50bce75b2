"""The one engine of sweeps: what is missing is computed, journaled, and ends in one table.

`oled.sweep`, `oled sweep`, `oled simulate -m` and the sweeps of other verbs all run here; it knows
neither Hydra nor what a point computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas as pd

from oled.errors import UserError
from oled.results import table as results
from oled.sweeps.configuration import overrides_text
from oled.sweeps.journal import Journal, Row

log = logging.getLogger("oled")


class Point(Protocol):
    """One configuration of a sweep."""

    @property
    def given(self) -> tuple[tuple[str, Any], ...]: ...

    def columns(self) -> Mapping[str, Any]: ...


P = TypeVar("P", bound=Point)
Compute = Callable[[Mapping[str, P]], Iterator[tuple[str, Row]]]
"""From points by their digest to a row for each digest."""


def row_of(point: Point, figures: Callable[[], Mapping[str, Any]]) -> Row:
    """Return a point's row: what was given, its columns, its error or its figures."""
    row = {"overrides": overrides_text(point.given), **point.columns()}
    try:
        return row | {"error": None} | dict(figures())
    except UserError as error:
        return row | {"error": str(error)}
    except Exception as error:
        log.exception("%s failed", row["overrides"])
        return row | {"error": f"{type(error).__name__}: {error}"}


def run_points(
    points: Mapping[str, P],
    compute: Compute[P],
    *,
    out: Path | None,
    declaration: Mapping[str, Any],
    resume: bool,
) -> pd.DataFrame:
    """Return a row for each point, by its digest in order; compute those that are not there yet.

    Whatever stops the sweep, what is done is in OUT/results.parquet. Without `resume` the results
    of an older sweep in OUT are removed first. Raises UserError where `resume` finds another base.
    """
    journal = None if out is None else Journal(out, declaration, resume=resume)
    rows: dict[str, Row] = {} if journal is None else dict(journal.done)
    missing = {digest: point for digest, point in points.items() if digest not in rows}
    try:
        for digest, row in compute(missing):
            rows[digest] = {"digest": digest, **row}
            if journal:
                journal.append(rows[digest])
    finally:
        done = [rows[digest] for digest in points if digest in rows]
        table = table_of(done, axes_of([point.given for point in points.values()]))
        if out is not None:
            results.save_table(table, out / results.TABLE)
    return table


def axes_of(given: Sequence[Iterable[tuple[str, Any]]]) -> list[str]:
    """Return the keys whose values differ between points, in the order in which they are given."""
    values: dict[str, list[str]] = {}
    for pairs in given:
        for key, value in pairs:
            values.setdefault(key, []).append(str(value))
    return [key for key, found in values.items() if len({*found}) > 1 or len(found) < len(given)]


def table_of(rows: Iterable[Row], axes: Iterable[str]) -> pd.DataFrame:
    """Return the rows as a table, the columns of the swept axes first."""
    table = pd.DataFrame(list(rows))
    named = (results.column_of(axis) for axis in axes)
    first = list(dict.fromkeys(column for column in named if column in table))
    return table[[*first, *(column for column in table if column not in first)]]
