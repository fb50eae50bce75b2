"""The pools of the blocks under way, where a rule keeps a block's first one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled.reroute.rule import Reroute, Routed

Block = tuple[int, int]
"""Request and block."""


class Pools:
    """Asks a rule for pools, and remembers those that hold for all forwards of a block."""

    def __init__(self, rule: Reroute) -> None:
        self.rule = rule
        self._kept: dict[tuple[int, int], tuple[int, NDArray[np.bool_]]] = {}

    def of(self, block: Block, layer: int, routed: Routed) -> NDArray[np.bool_]:
        """The pool [E] of a layer in this forward of the block."""
        if not self.rule.keeps_pool:
            return self.rule.pool(routed)
        request, number = block
        known = self._kept.get((request, layer))
        if known is None or known[0] != number:
            known = (number, self.rule.pool(routed))
            self._kept[request, layer] = known
        return known[1]
