"""Means with bootstrap intervals over requests, and rank correlation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oled.types import Array, Doubles

SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and its 95 % interval over requests (None where there are fewer than two)."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(numerators: Array, denominators: Array) -> Estimate | None:
    """Return the sum over the sum of what each request contributes; None where nothing does."""
    total = float(denominators.sum())
    if total == 0:
        return None
    value = float(numerators.sum()) / total
    requests = int(np.count_nonzero(denominators))
    if requests < 2:
        return Estimate(value)
    rng = np.random.default_rng(0)  # the same intervals at each call
    chosen = np.flatnonzero(denominators)
    draws = rng.multinomial(requests, np.full(requests, 1 / requests), size=SAMPLES)
    means = (draws @ numerators[chosen]) / (draws @ denominators[chosen])
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def means_of(sums: Doubles, counts: Doubles) -> tuple[float | None, ...]:
    """Return sums over counts, None where nothing was counted."""
    pairs = zip(sums, counts, strict=True)
    return tuple(float(total / count) if count else None for total, count in pairs)


def spearman(x: Doubles, y: Doubles) -> float | None:
    """Return the rank correlation, ties at their mean rank; None where one side does not vary."""
    if len(x) < 3:
        return None
    a, b = _ranks(x), _ranks(y)
    a -= a.mean()
    b -= b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else None


def _ranks(values: Doubles) -> Doubles:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Doubles = (last - (counts - 1) / 2)[place]
    return ranks
