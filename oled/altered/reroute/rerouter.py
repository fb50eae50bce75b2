"""A rule at work on the blocks of a trace or of a running model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled.altered.reroute.change import RouteChange, Sums, rule_text
from oled.altered.reroute.inside import route_inside
from oled.altered.reroute.rule import Reroute, Routed
from oled.trace.schema import Phase

BLOCK_PHASES = (Phase.DENOISE, Phase.COMMIT)
"""Forwards of one block, whose tokens share a pool; others keep their routes."""
Block = tuple[int, int]
"""Request, and block in it."""


class Rerouter:
    """Routes layer after layer; remembers pools that hold for a block, and counts what it changed.

    `renormalise`: whether a token's weights add up to a constant in this model.
    """

    def __init__(self, rule: Reroute, *, renormalise: bool) -> None:
        self.rule = rule
        self._renormalise = renormalise
        self._kept: dict[tuple[int, int], tuple[int, NDArray[np.bool_]]] = {}
        self._sums = Sums()

    def route(
        self, block: Block, layer: int, routed: Routed
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return new ids and weights [T, k] of a layer in one forward of a block."""
        pool = self.pool(block, layer, routed)
        ids, weights = route_inside(routed, pool, renormalise=self._renormalise)
        self._sums.add(routed, ids)
        return ids, weights

    def pool(self, block: Block, layer: int, routed: Routed) -> NDArray[np.bool_]:
        """Return the pool [E] of a layer in this forward."""
        if not self.rule.keeps_pool:
            return self.rule.pool(routed)
        request, number = block
        known = self._kept.get((request, layer))
        if known is None or known[0] != number:
            known = (number, self.rule.pool(routed))
            self._kept[request, layer] = known
        return known[1]

    @property
    def change(self) -> RouteChange:
        """Return the changes so far."""
        return self._sums.change(rule_text(self.rule.describe()))
