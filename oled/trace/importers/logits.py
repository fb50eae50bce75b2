"""From router logits to experts and weights, as routers without bias and groups do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.options import Options
from oled.trace.schema import WeightKind
from oled.types import Array, Doubles, Ints

SCORINGS = ("softmax", "sigmoid", "selected")


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router turns its output into weights."""

    top_k: int
    scoring: str = "softmax"
    softmaxed: bool = False  # the output is probabilities already
    normalise: bool = True
    scale: float = 1.0

    @classmethod
    def of(cls, options: Options, top_k: int) -> Self:
        """Read the routing from the options."""
        return cls(
            top_k,
            options.choice("scoring", SCORINGS, "softmax"),
            options.flag("softmaxed", False),
            options.flag("normalise", True),
            options.number("scale") or 1.0,
        )

    @property
    def kind(self) -> tuple[WeightKind, float | None]:
        """What the weights add up to."""
        if self.scoring == "selected":
            return WeightKind.SOFTMAX_SELECTED, None
        if not self.normalise:
            return WeightKind.UNNORMALISED, None
        if self.scale == 1:
            return WeightKind.SUM_ONE, None
        return WeightKind.SCALED_SUM, self.scale

    def scores(self, logits: Array, where: str) -> Doubles:
        """Return scores of all experts [T, E]; refuse what is not finite or not what was said."""
        with np.errstate(all="ignore"):  # what is not finite is refused next
            values = logits.astype(np.float64)
        if not np.isfinite(values).all():
            token, expert = np.argwhere(~np.isfinite(values))[0]
            raise TraceError(f"{where}: token {token}, expert {expert}: {values[token, expert]}")
        sums = values.sum(axis=1)
        are_probabilities = bool((values >= 0).all() and (np.abs(sums - 1) < 1e-2).all())
        if self.softmaxed:
            if not are_probabilities:
                raise TraceError(f"{where}: these are no probabilities: leave softmaxed=true out")
            return values
        if are_probabilities and len(values) > 1:  # one row may look like that by chance
            raise TraceError(f"{where}: these are probabilities already: say softmaxed=true")
        if self.scoring == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-np.clip(values, -700, 700))))
        return softmax(values)

    def best(self, scores: Doubles, count: int) -> Ints:
        """Return the experts with the best scores, best first; ties by id: i64[T, count]."""
        return np.argsort(-scores, axis=1, kind="stable")[:, :count]

    def weights(self, logits: Array, scores: Doubles, ids: Ints) -> Doubles:
        """Return weights of the chosen experts [T, k]."""
        if self.scoring == "selected" and not self.softmaxed:
            return softmax(np.take_along_axis(logits.astype(np.float64), ids, axis=1))
        chosen = np.take_along_axis(scores, ids, axis=1)
        if self.normalise or self.scoring == "selected":
            chosen = chosen / np.maximum(chosen.sum(axis=1, keepdims=True), 1e-20)
        return np.asarray(chosen * self.scale)


def softmax(values: Doubles) -> Doubles:
    """Return the softmax over the last axis."""
    raised = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))
