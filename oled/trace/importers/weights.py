"""What a recording's gate weights are: as the user says, else as their sums show."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.options import Options
from oled.trace.schema import WeightKind
from oled.types import Floats

WEIGHTS = {
    "weights": "auto, none, sum_one, unnormalised, softmax_selected, or their sum as 2.5 (auto)"
}
"""The option of every importer whose source may hold gate weights."""
TOLERANCE = 4e-3


def weight_kind(
    path: Path, options: Options, weights: Floats | None, none: str
) -> tuple[WeightKind, float | None]:
    """Return the kind of weights [..., k], and their sum if that was given.

    `weights` is None where the source has none; `none` says so to a user who named a kind.
    """
    asked = options.text("weights") or "auto"
    if asked == WeightKind.NONE or (asked == "auto" and weights is None):
        return WeightKind.NONE, None
    if weights is None:
        raise TraceError(f"{path}: weights={asked}, but {none}")
    if asked == "auto":
        ones = np.abs(weights.sum(axis=-1, dtype=np.float64) - 1) <= TOLERANCE
        return (WeightKind.SUM_ONE if ones.all() else WeightKind.UNNORMALISED), None
    if asked in (WeightKind.SUM_ONE, WeightKind.UNNORMALISED, WeightKind.SOFTMAX_SELECTED):
        return WeightKind(asked), None
    return WeightKind.SCALED_SUM, options.number("weights")
