"""EPIC, *all of it a reconstruction*: moves that pay for themselves, and standby copies put to use.

Only one sentence is public: performance-aware expert migration and run-time expert activation
against imbalance, topology-adaptive transport and fine-grained overlap of computation and
communication (the latter two are keys of the composition). What we make of it:

*Migration.* Every `interval` forwards each layer's steps since the last time are taken for those to
come (`forecast`). Then, one after the other, the change that shortens them most is made, if that
saves the time that its bytes take on the link within `payback` steps, `moves` changes a layer at
most: an expert of the rank that the steps wait for longest and one of the rank with least to do
change places, or the former gets a standby copy in another rank's `spare` slots (a free one, else
in the place of the copy with least work there).

*Activation.* In each step, routing known, all tokens go to the first copies. Then, while it
shortens the busiest rank's time, all or half of the tokens of one of its experts go to another rank
that holds a copy: the choice that leaves the slower of the two ranks fastest. A token goes to a
copy on its own rank where one is in use.

Cost: O(moves x interval x (E / R)^2) a layer and rebalancing, O(E + changes x copies) a step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.parallel.layout import Layout
from oled.parallel.placement import LayerStep, Past, Placement
from oled.parallel.placements.activation import activate, spread
from oled.parallel.placements.forecast import Forecast
from oled.parallel.prices import Prices
from oled.types import Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Epic(Placement):
    """Migration by predicted gain, activation of standby copies by the step's own load."""

    interval: int = 16
    spare: int = 2
    moves: int = 8
    payback: int = 64

    def __post_init__(self) -> None:
        Placement.__post_init__(self)
        if self.moves < 0 or self.payback < 0:
            raise ValueError(
                f"moves is {self.moves} and payback {self.payback}; both must be at least 0"
            )

    def rebalance(self, past: Past, layout: Layout, prices: Prices) -> Layout:
        changed = Layout(layout.holds.copy(), layout.primary.copy())
        for layer in np.flatnonzero(past.steps).tolist():
            forecast = Forecast.of(layer, past, layout, prices, self.spare)
            for _ in range(self.moves):
                better = forecast.improved(self.payback)
                if better is None:
                    break
                forecast = better
            experts = forecast.primary.size
            changed.holds[layer, :, :experts] = forecast.holds
            changed.primary[layer, :experts] = forecast.primary
        return changed

    def deal(self, step: LayerStep, layout: Layout, prices: Prices) -> Ints:
        first = Placement.deal(self, step, layout, prices)
        return spread(step, first, activate(step, layout, prices))
