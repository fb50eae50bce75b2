"""Placement policies: which rank holds which expert, and which copy serves a token.

It moves nothing and knows no clock. Frozen dataclasses of hyper-parameters, one file each in
`oled/parallel/placements`; a named system is a YAML in `conf/policy` with a `placement`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.parallel.layout import Layout
from oled.parallel.prices import Prices
from oled.types import Ints


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerStep:
    """One layer of one forward, as the router left it. T tokens, k top-k."""

    layer: int  # 0..L-1
    home: Ints  # [T] rank on which a token lives
    expert: Ints  # [T, k], -1 unused


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Work since the last rebalancing. Zeros at its beginning; the clock adds every layer-step."""

    pairs: Ints  # [L, R, E] (token, expert) pairs by the rank that the token lives on
    counts: Ints  # [W, L, E] pairs of the layer's w-th step
    steps: Ints  # [L] layer-steps so far, at most W

    @classmethod
    def nothing(cls, most: int, num_experts: Ints, ranks: int) -> Past:
        """Return zeros with room for `most` steps of each layer."""
        layers, experts = num_experts.size, int(num_experts.max())
        shapes = ((layers, ranks, experts), (most, layers, experts), (layers,))
        return cls(*(np.zeros(shape, np.int64) for shape in shapes))

    def add(self, step: LayerStep) -> None:
        """Count one more layer-step."""
        used = step.expert >= 0
        home = np.broadcast_to(step.home[:, None], step.expert.shape)[used]
        np.add.at(self.pairs[step.layer], (home, step.expert[used]), 1)
        np.add.at(self.counts[self.steps[step.layer], step.layer], step.expert[used], 1)
        self.steps[step.layer] += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """A placement policy. This one keeps each expert on one rank for ever.

    interval: forwards between two rebalancings; 0: never.
    spare: slots of a rank and layer beyond its share of the experts.
    """

    interval: int = 0
    spare: int = 0

    def __post_init__(self) -> None:
        for name in ("interval", "spare"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def slots(self, num_experts: Ints, ranks: int) -> Ints:
        """Return how many experts of each layer a rank can hold, i64[L]."""
        return np.minimum(-(-num_experts // ranks) + self.spare, num_experts)

    def rebalance(self, past: Past, layout: Layout, prices: Prices) -> Layout:
        """Return the layout for the forwards to come, from the work since the last rebalancing."""
        return layout

    def deal(self, step: LayerStep, layout: Layout, prices: Prices) -> Ints:
        """Return the rank that serves each (token, slot) [T, k], -1 where the slot is unused.

        Only ranks that hold the expert may serve it.
        """
        served: Ints = np.where(step.expert < 0, -1, layout.primary[step.layer][step.expert])
        return served
