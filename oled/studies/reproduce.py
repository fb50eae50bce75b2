"""`reproduce`: run a study of `experiments/`, draw its figure, set ours beside the paper's.

A study is one module with TITLE, `rows(run)` (usually one sweep), `draw(table)`, `summary(table)`
and `claims(table)`. Verdicts follow one rule for all: *reproduced* is within a quarter of the
paper's figure, *same direction* has its sign or order, everything else is *not reproduced*.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from oled.atomic import write_text
from oled.results import table as results
from oled.sweeps import Workers, sweep
from oled.sweeps.run import Axes

log = logging.getLogger("oled")

TOLERANCE = 0.25
REPRODUCED, DIRECTION, NOT = "reproduced", "same direction", "not reproduced"
UNKNOWN, UNDECIDED, UNREAD = "no public figure", "undecided", "what is compared is not public"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """How a study is run."""

    small: bool
    out: Path
    resume: bool = False
    workers: Workers = Workers()  # noqa: RUF009 (frozen)

    def sweep(self, axes: Axes, base: Mapping[str, Any] | None = None) -> pd.DataFrame:
        return sweep(axes, base=base, out=self.out, resume=self.resume, workers=self.workers)


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A line of *ours beside the paper's*."""

    what: str
    paper: str
    ours: str
    verdict: str
    why: str = ""


class Study(Protocol):
    """What a module of `experiments/` holds."""

    TITLE: str

    def rows(self, run: Run) -> pd.DataFrame: ...

    def draw(self, table: pd.DataFrame) -> Figure: ...

    def summary(self, table: pd.DataFrame) -> str: ...

    def claims(self, table: pd.DataFrame) -> list[Claim]: ...


def reproduce(
    name: str,
    root: Path,
    *,
    small: bool = False,
    resume: bool = False,
    redraw: bool = False,
    workers: Workers = Workers(),  # noqa: B008 (frozen)
) -> tuple[Path, pd.DataFrame]:
    """Run a study into ROOT/NAME (results, figure, table.md); return the folder and all rows.

    With `redraw` nothing is simulated: figure and table are made of the rows that are there.
    """
    study: Study = cast(Study, importlib.import_module(f"oled.bundled.studies.{name}"))
    style = importlib.import_module("oled.bundled.plots.style")
    log.info("%s: %s", name, study.TITLE)
    folder = root / name
    table = None if redraw else study.rows(Run(small, folder, resume, workers))
    done = results.read_table(folder)
    style.save(study.draw(done), folder, name)
    write_text(folder / "table.md", page(name, study, done, small))
    return folder, done if table is None else table


def page(name: str, study: Study, table: pd.DataFrame, small: bool) -> str:
    """Return the text of table.md."""
    command = f"oled reproduce {name}" + (" --small" if small else "")
    claims = pd.DataFrame([dataclasses.asdict(claim) for claim in study.claims(table)])
    claims.columns = ["what", "the paper's", "ours", "verdict", "why"]
    parts = [
        f"# {study.TITLE}",
        f"`{command}` · {len(table)} rows in `results.parquet`",
        study.summary(table),
        "## Ours beside the paper's",
        markdown(claims),
        "A verdict is *reproduced* within a quarter of the paper's figure or in the range that the "
        "line allows, *same direction* where sign or order agree. Ours are simulated; no constant "
        "belongs to this table alone.",
        f"## Made from\n\n{_origin(table)}",
    ]
    return "\n\n".join(parts) + "\n"


def _origin(table: pd.DataFrame) -> str:
    """Name traces, machines and versions."""
    lines = []
    if "provenance.trace_hash" in table:
        pairs = table[["provenance.trace", "provenance.trace_hash"]].drop_duplicates()
        lines += [f"- trace `{name}`, hash `{code[:16]}`" for name, code in pairs.to_numpy()]
    for column, word in (("hardware", "machine"), ("runtime", "runtime"), ("geometry", "costs of")):
        if column in table:
            values = table[column].dropna().drop_duplicates()
            lines += [f"- {word} `{value}`" for value in values]
    if "provenance.labels" in table:
        lines += [f"- labels {text}" for text in table["provenance.labels"].drop_duplicates()]
    versions = [column for column in table if str(column).startswith("provenance.versions.")]
    found = [f"{str(c).rpartition('.')[2]} {table[c].iloc[0]}" for c in versions]
    return "\n".join([*lines, *([f"- {', '.join(found)}"] if found else [])])


def markdown(table: pd.DataFrame) -> str:
    """Write a table for people; numbers are formatted by who makes it."""
    rows = [[str(name) for name in table.columns], ["---"] * len(table.columns)]
    rows += [[str(value) for value in row] for row in table.to_numpy()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def judge(paper: float, ours: float, neutral: float = 0.0) -> str:
    """Judge one figure; `neutral` is no effect: 0 of gains, 1 of ratios."""
    if (ours - neutral) * (paper - neutral) <= 0:
        return NOT
    return REPRODUCED if abs(ours - paper) <= TOLERANCE * abs(paper) else DIRECTION


def judge_range(paper: tuple[float, float], ours: tuple[float, float], neutral: float = 1.0) -> str:
    """Judge a range: of its two ends, the worse one."""
    order = (REPRODUCED, DIRECTION, NOT)
    ends = [judge(a, b, neutral) for a, b in zip(paper, ours, strict=True)]
    return max(ends, key=order.index)


def ratio_interval(over: str, under: str) -> tuple[float, float]:
    """Return 95 % over requests of a ratio of sums, in pairs; both are JSON lists by request.

    1,000 resamples of whole requests, always the same; of one request the two ends are the ratio.
    """
    pairs = np.array([json.loads(over), json.loads(under)], float)  # [2, R]
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(1000, pairs.shape[1]))
    sums = pairs[:, drawn].sum(axis=2)
    low, high = np.percentile(sums[0] / sums[1], (2.5, 97.5))
    return float(low), float(high)


def pick(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Pick the rows whose columns have these values (`in` a list, where it is one)."""
    for column, value in values.items():
        wanted = value if isinstance(value, list) else [value]
        table = table[table[column].isin(wanted)]
    return table


def wide(table: pd.DataFrame, rows: Iterable[str], across: str, value: str) -> pd.DataFrame:
    """Spread `value` by `rows` and `across`, both in the order in which they occur."""
    keys = list(rows)
    shaped = table.pivot_table(value, keys, across, sort=False, aggfunc="first")
    return shaped[list(dict.fromkeys(table[across]))].reset_index()


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def gain(before: pd.Series[float], after: pd.Series[float]) -> float:
    """Return mean share of TPOT that is saved, row by row."""
    return float((1 - after.to_numpy() / before.to_numpy()).mean())
