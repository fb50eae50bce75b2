"""Block pool: per block the experts with the highest score of any token.

Source: technical report of LLaDA2.2 (in inclusionAI/LLaDA2.X), where it is trained in: of 256
experts the 48 with the largest maximum of the scores over the block's tokens are admitted, then
every token takes its eight inside the pool. *Reconstruction*: the scores are those that the router
chooses by, its group limit does not hold for newcomers, and models here were not trained with it.
The published sentence does not say for how long a pool lives: by default each forward makes its
own, so that it drifts; with `fixed` (ours) the block's first forward, all masks, makes it for all
of the block.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled.altered.reroute.rule import Reroute, Routed, best, pool_size, require_share


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPool(Reroute):
    """`share`: the pool as a share of the layer's experts, 48 of 256."""

    share: float = 0.1875
    fixed: bool = False

    def __post_init__(self) -> None:
        require_share(self.share)

    @property
    def keeps_pool(self) -> bool:
        return self.fixed

    def pool(self, routed: Routed) -> NDArray[np.bool_]:
        return best(routed.chosen_by.max(axis=0), pool_size(self.share, routed))
