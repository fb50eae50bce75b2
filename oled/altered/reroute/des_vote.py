"""DES-Vote: the pool is the experts with most gate weight over all tokens of the block.

Source: Dynamic Expert Sharing (arXiv 2602.00879; summaries): every token's k weights are added up
by expert, the best share of the layer's experts stays, all tokens are routed again inside it and
their weights renormalised. Published for LLaDA2.0-mini at block 32: share 0.15 leaves 38 of 84
distinct experts and 99.5 % of the accuracy, 0.10 leaves 25 and 96.4 %. *Reconstruction*: masked and
decoded tokens vote alike.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled.altered.reroute.rule import Reroute, Routed, best, pool_size, require_share


@dataclasses.dataclass(frozen=True, slots=True)
class DesVote(Reroute):
    """`share`: the pool as a share of the layer's experts (the paper's beta)."""

    share: float = 0.15

    def __post_init__(self) -> None:
        require_share(self.share)

    def pool(self, routed: Routed) -> NDArray[np.bool_]:
        return best(routed.votes(), pool_size(self.share, routed))
