"""Held against the world: decode speeds that people measured, predicted from their settings.

The rows are facts from public text (`field_data/README.md`). What was for development and what for
judgement was drawn before any error was looked at (`field_data/split.json`); docs/field.md says
what was looked at, and how often.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from oled.bundled.plots.field import draw
from oled.field.judge import TARGETS, by_group, by_kind, errors, relative, signs
from oled.field.predict import Prediction, predict
from oled.field.tables import Row, read_rows
from oled.results import table as results
from oled.studies.reproduce import Claim, Run, markdown

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Held against the world: decode speeds that people measured"
DATA = Path(__file__).parent / "field_data"
SMALL = 5
"""Every so manyth row in the small preset."""
DEVELOPMENT, JUDGEMENT = "development", "judgement"
INSIDE, OUTSIDE = "inside", "outside"


def rows(run: Run) -> pd.DataFrame:
    """Predict every row of the committed tables; one row each, those without a prediction too."""
    run.out.mkdir(parents=True, exist_ok=True)
    tables = [
        read_rows(DATA / "bench.csv", DATA / "bench_hosts.csv"),
        read_rows(DATA / "users.csv"),
        read_rows(DATA / "published.csv"),
    ]
    step = SMALL if run.small else 1
    found = [p for table in tables for p in predict(table[::step])]
    judged = errors(found).set_index("id")
    return results.write_table([_row(p, judged) for p in found], run.out / results.TABLE)


def _row(p: Prediction, judged: pd.DataFrame) -> dict[str, Any]:
    own = judged.loc[p.row.id].to_dict() if p.row.id in judged.index else {}
    return {
        "id": p.row.id,
        "group": p.row.group,
        "split": split_of(p.row),
        "source": p.row.facts.get("source", ""),
        "form": p.row.form,
        "reason": p.reason,
    } | own


def split_of(row: Row) -> str:
    """Return `development` or `judgement`; a machine of the bench goes by its CPU's label."""
    split = json.loads((DATA / "split.json").read_text(encoding="utf-8"))
    if row.form == "bench" or row.group.startswith("sol-"):
        name = row.facts["cpu"].split(" (")[0]
        parts = list(split["bench"].values())
    else:
        name, parts = row.group, [split[row.form]]
    development = any(name in part[DEVELOPMENT] for part in parts)
    return DEVELOPMENT if development else JUDGEMENT


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have a prediction and a measurement."""
    return table[table["time_error"].notna()].copy() if "time_error" in table else table[:0]


def summary(table: pd.DataFrame) -> str:
    """Return errors by class and split, the bench's signs, and groups."""
    found = judged(table)
    parts = [
        f"{len(found)} of {len(table)} rows have a prediction beside a measurement. Errors are of "
        "time: predicted over measured, less 1. A row is *inside* if what was measured lies in the "
        "interval of its inputs.",
        markdown(_by_split(found)),
    ]
    for split in (JUDGEMENT, DEVELOPMENT):
        right, pairs = signs(found[(found["split"] == split) & _consumer(found)])
        if pairs:
            parts.append(
                f"Sign of a change of policy on one consumer host, where it exceeds 5 %, {split}: "
                f"right in {right} of {pairs} pairs ({100 * right / pairs:.1f} %)."
            )
    for split in (JUDGEMENT, DEVELOPMENT):
        right, pairs = signs(found[found["split"] == split], "engine")
        if pairs:
            parts.append(
                f"Which of two engines is faster on one machine, with one model and budget, where "
                f"they differ by 5 %, {split}: right in {right} of {pairs} pairs "
                f"({100 * right / pairs:.1f} %)."
            )
    parts += ["### Rows without a prediction", markdown(_reasons(table))]
    return "\n\n".join(parts)


def _consumer(found: pd.DataFrame) -> pd.Series[bool]:
    return found["kind"] == "bench, consumer"


def _by_split(found: pd.DataFrame) -> pd.DataFrame:
    tables = []
    for split, part in found.groupby("split", sort=False):
        shown = by_kind(part).assign(split=split)
        shown["ratios"] = [
            np.median(np.abs(_ratios(part[part["kind"] == kind]))) for kind in shown["class"]
        ]
        tables.append(shown)
    shown = pd.concat(tables).sort_values(["class", "split"], kind="stable")
    for column in ("median", "p90", "ratios", "inside"):
        shown[column] = [percent(value) for value in shown[column]]
    shown = shown.rename(columns={"ratios": "median, ratios", "p90": "P90"})
    return shown[["class", "split", "rows", "groups", "median", "P90", "median, ratios", "inside"]]


def _ratios(part: pd.DataFrame) -> np.ndarray[Any, Any]:
    """Errors of the ratios inside groups: the level of each machine taken out."""
    return np.concatenate([relative(own) for _, own in part.groupby("group")] or [[0.0]])


def percent(share: float) -> str:
    """Return a share as people read it."""
    return "-" if np.isnan(share) else f"{100 * share:.1f} %"


def _reasons(table: pd.DataFrame) -> pd.DataFrame:
    reasons = table.loc[table["reason"] != "", "reason"].str.replace(r"'[^']*'", "…", regex=True)
    counted = reasons.value_counts().reset_index()
    return counted.set_axis(["why", "rows"], axis=1)


def claims(table: pd.DataFrame) -> list[Claim]:
    """Return the targets, each on judgement groups, then a verdict for every group."""
    found = judged(table)
    lines = []
    judgement = by_kind(found[found["split"] == JUDGEMENT]).set_index("class")
    for kind, (median, p90) in TARGETS.items():
        if kind not in judgement.index:
            continue
        own = judgement.loc[kind]
        met = own["median"] <= median and own["p90"] <= p90
        lines.append(
            Claim(
                f"{kind}, judgement: median and P90 of the time error",
                f"aimed at {percent(median)}, {percent(p90)}",
                f"{percent(own['median'])}, {percent(own['p90'])}",
                "met" if met else "not met",
                f"{own['rows']:.0f} rows of {own['groups']:.0f} groups",
            )
        )
    for split, part in found.groupby("split", sort=False):
        for own in by_group(part).to_dict("records"):
            times = part.loc[part["group"] == own["group"], "measured_ms"]
            lines.append(
                Claim(
                    f"{own['group']} ({own['class']}, {split}), {own['rows']} rows",
                    f"{times.min():.1f} to {times.max():.1f} ms"
                    if len(times) > 1
                    else f"{times.iloc[0]:.1f} ms",
                    f"error {100 * own['error']:+.1f} %, worst {100 * own['worst']:+.1f} %",
                    own["verdict"],
                    f"ratios {percent(own['ratios'])}" if not np.isnan(own["ratios"]) else "",
                )
            )
    return lines
