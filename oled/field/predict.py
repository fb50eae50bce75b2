"""Predict the rows of a table: time or speed as the row has it, with an interval, or why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from oled.atomic import write_text
from oled.errors import UserError
from oled.field import bench, reports
from oled.field.events import lru_misses
from oled.field.replay import token_ns
from oled.field.scenario import Scenario
from oled.field.tables import Facts, Row, UnpredictableError

COLUMNS = ("id", "group", "measured", "predicted", "low", "high", "unit", "reason")
NS = {"ms": 1e6, "s": 1e9}

SPREAD = {
    "bench, consumer": (0.90, 1.08),
    "bench, server": (0.55, 1.10),
    "bench, by parts": (0.75, 1.25),
    "host probed": (0.70, 1.15),
    "parts named": (0.55, 1.30),
}
"""How slow and how fast memory, link and GPU may be, as shares of what is taken, by class: where
nine of ten rows of the development groups lie, rounded outwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A row's prediction in its own unit; `predicted` None with a reason."""

    row: Row
    predicted: float | None
    low: float | None
    high: float | None
    kind: str  # whose errors are counted together
    reason: str = ""

    @property
    def time_error(self) -> float | None:
        """Predicted over measured time, less 1."""
        if not self.predicted or not self.row.measured:
            return None
        if self.row.unit not in (*NS, "tok/s"):
            return None
        ratio = self.predicted / self.row.measured
        return ratio - 1 if self.row.unit in NS else 1 / ratio - 1


def predict(rows: Iterable[Row]) -> list[Prediction]:
    """Predict every row from its facts; what was measured is looked at by nothing here."""
    return [_predict(row) for row in rows]


def _predict(row: Row) -> Prediction:
    try:
        if row.unit == "%" and "hit rate" in row.facts["metric"]:
            return _hit_rate(row)
        if row.unit not in (*NS, "tok/s"):
            raise UnpredictableError(f"unit '{row.unit}': only times and speeds are predicted")
        scenario, kind = scenario_of(row)
    except UnpredictableError as reason:
        return Prediction(row, None, None, None, "", str(reason))
    slow, fast = SPREAD[kind]
    times = [token_ns(scenario.at(speed, speed)) for speed in (1.0, fast, slow)]
    values = [_in_unit(time, row.unit) for time in times]
    return Prediction(row, values[0], min(values), max(values), kind)


def _hit_rate(row: Row) -> Prediction:
    """Predict the hit rate of an LRU cache, %."""
    share, shape = reports.lru_share(reports.of_published(row.facts))
    misses = lru_misses(share, shape.lru)
    low, high = (100 * max(0.0, 1 - misses * times) for times in HIT_SPREAD)
    return Prediction(row, 100 * (1 - misses), low, high, "hit rates")


HIT_SPREAD = (1.35, 0.65)
"""Misses of other texts and of a cold start, to those of the curve."""


def scenario_of(row: Row) -> tuple[Scenario, str]:
    """Return a row's scenario and its class.

    Raises: UnpredictableError.
    """
    if row.form == "bench":
        by_parts = not bench.probed(row.facts)
        kind = "by parts" if by_parts else row.facts.get("family") or "consumer"
        return bench.scenario(row.facts), f"bench, {kind}"
    words: Callable[[Facts], reports.Report]
    words = reports.of_users if row.form == "users" else reports.of_published
    scenario, probed = reports.scenario(words(row.facts))
    return scenario, "host probed" if probed else "parts named"


def _in_unit(time_ns: float, unit: str) -> float:
    return time_ns / NS[unit] if unit in NS else 1e9 / time_ns


def table(predictions: Iterable[Prediction]) -> pd.DataFrame:
    """Return predictions as `predictions.csv` has them, one row each."""
    rows = [
        (p.row.id, p.row.group, p.row.measured, p.predicted, p.low, p.high, p.row.unit, p.reason)
        for p in predictions
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def write(predictions: list[Prediction], out: Path) -> Path:
    """Write OUT/predictions.csv.

    Raises: UserError where OUT is a file.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: out=DIR names a folder")
    out.mkdir(parents=True, exist_ok=True)
    text = table(predictions).to_csv(index=False, float_format="%.6g")
    return write_text(out / "predictions.csv", text)
