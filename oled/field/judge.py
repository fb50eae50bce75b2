"""Hold predictions against what was measured: absolute errors, and relative ones inside a group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Literal

import numpy as np
import pandas as pd

from oled.field.predict import NS, Prediction

CLEAR = 0.05
"""A change of less than this may have either sign."""

TARGETS = {
    "bench, consumer": (0.035, 0.12),
    "host probed": (0.05, 0.20),
    "parts named": (0.12, 0.35),
}
"""Median and 90th percentile of the time error that were aimed at, by class."""


def errors(predictions: Iterable[Prediction]) -> pd.DataFrame:
    """Return one row a prediction that has both sides.

    Columns: kind, group, id, measured_ms, predicted_ms, low_ms, high_ms, time_error, inside (the
    interval), and what varies.
    """
    rows = []
    for p in predictions:
        error = p.time_error
        if error is None or p.row.measured is None or p.low is None or p.high is None:
            continue
        measured, predicted = (_ms(value, p.row.unit) for value in (p.row.measured, p.predicted))
        ends = sorted((_ms(p.low, p.row.unit), _ms(p.high, p.row.unit)))
        facts = p.row.facts
        rows.append(
            {
                "kind": p.kind,
                "group": p.row.group,
                "id": p.row.id,
                "model": facts["model"],
                "setting": _setting(p),
                "budget": facts["share_pct"] or facts["experts_on_gpu"] or facts["budget"],
                "policy": facts["policy"],
                "engine": facts["software"] or facts["system"],
                "measured_ms": measured,
                "predicted_ms": predicted,
                "low_ms": ends[0],
                "high_ms": ends[1],
                "time_error": error,
                "inside": ends[0] <= measured <= ends[1],
            }
        )
    return pd.DataFrame(rows)


def _setting(p: Prediction) -> str:
    facts = p.row.facts
    if p.row.form == "bench":
        return f"{facts['policy']}, {facts.get('share_pct')} %"
    if p.row.form == "users":
        return facts["experts_on_gpu"]
    return f"{facts['system']}, {facts['budget']}"


def _ms(value: float | None, unit: str) -> float:
    if value is None:
        raise ValueError("a row without a value has no time")
    return 1e3 / value if unit not in NS else value * NS[unit] / 1e6


def by_kind(found: pd.DataFrame) -> pd.DataFrame:
    """Return per class: rows, groups, median and P90 of the absolute time error, share inside."""
    rows = []
    for kind, part in found.groupby("kind", sort=True):
        size = part["time_error"].abs()
        rows.append(
            {
                "class": kind,
                "rows": len(part),
                "groups": part["group"].nunique(),
                "median": size.median(),
                "p90": size.quantile(0.9),
                "inside": part["inside"].mean(),
            }
        )
    return pd.DataFrame(rows)


def by_group(found: pd.DataFrame) -> pd.DataFrame:
    """Return per group: rows, median signed error, worst, error of ratios inside it, verdict."""
    rows = []
    for (kind, group), part in found.groupby(["kind", "group"], sort=True):
        ratios = relative(part)
        rows.append(
            {
                "class": kind,
                "group": group,
                "rows": len(part),
                "error": part["time_error"].median(),
                "worst": max(part["time_error"], key=abs),
                "ratios": float(np.median(np.abs(ratios))) if ratios.size else np.nan,
                "verdict": "inside" if part["inside"].mean() >= 0.5 else "outside",
            }
        )
    return pd.DataFrame(rows)


def relative(part: pd.DataFrame) -> np.ndarray:
    """Return the errors of the ratios to the group's geometric mean, per model.

    They are what is left when the level of a machine is taken out.
    """
    logs = [np.log(own["predicted_ms"] / own["measured_ms"]) for _, own in part.groupby("model")]
    return np.concatenate([np.expm1(log - log.mean()) for log in logs if len(log) > 1] or [[]])


def signs(found: pd.DataFrame, varied: Literal["policy", "engine"] = "policy") -> tuple[int, int]:
    """Return how many changes of policy (or engine) have the right sign, and how many there are.

    A change is a pair of one host, model and budget with measured times more than `CLEAR` apart.
    """
    right, pairs = 0, 0
    own = found[found[varied] != ""]
    for _, part in own.groupby(["group", "model", "budget"]):
        values = part[[varied, "measured_ms", "predicted_ms"]].to_numpy()
        for (one, m, p), (other, other_m, other_p) in itertools.combinations(values, 2):
            if one != other and max(m, other_m) / min(m, other_m) > 1 + CLEAR:
                pairs += 1
                right += int((m > other_m) == (p > other_p))
    return right, pairs


def summary(predictions: list[Prediction]) -> str:
    """Return the text that is printed: what was predicted, errors by class and by group."""
    found = errors(predictions)
    done = sum(p.predicted is not None for p in predictions)
    lines = [
        f"{done} of {len(predictions)} rows predicted, {len(found)} of them with a measurement"
    ]
    if not found.empty:
        percent = {"median": 1, "p90": 1, "inside": 0}
        lines += ["", _text(by_kind(found), percent)]
        right, pairs = signs(found)
        if pairs:
            lines.append(f"sign of a change of policy above 5 %: right in {right} of {pairs}")
        right, pairs = signs(found, "engine")
        if pairs:
            lines.append(f"which of two engines is faster, by 5 %: right in {right} of {pairs}")
        lines += ["", _text(by_group(found), {"error": 1, "worst": 1, "ratios": 1})]
    lines += _hit_rates(predictions)
    reasons = pd.Series([p.reason for p in predictions if p.reason]).value_counts()
    if len(reasons):
        lines += ["", "not predicted, and why:"]
        lines += [f"{count:5d}  {reason}" for reason, count in reasons.items()]
    return "\n".join(lines)


def _hit_rates(predictions: list[Prediction]) -> list[str]:
    """Return a line on hit rates: they are no times, their errors are in points."""
    points = [
        abs(p.predicted - p.row.measured)
        for p in predictions
        if p.kind == "hit rates" and p.predicted is not None and p.row.measured is not None
    ]
    if not points:
        return []
    return ["", f"hit rates: {len(points)} rows, median error {np.median(points):.1f} points"]


def _text(table: pd.DataFrame, percent: dict[str, int]) -> str:
    shown = table.copy()
    for column, places in percent.items():
        sign = "+" if column in ("error", "worst") else ""
        shown[column] = [
            "-" if pd.isna(value) else f"{100 * value:{sign}.{places}f} %"
            for value in table[column]
        ]
    return shown.to_string(index=False)
