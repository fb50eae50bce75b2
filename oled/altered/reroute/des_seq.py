"""DES-Seq: the pool is the union of every token's few most important experts.

Source: Dynamic Expert Sharing (arXiv 2602.00879; summaries): tokens that are decoded in parallel
share a core set, here the union of each token's top k' experts, k' < k; all tokens are then routed
again inside it and their weights renormalised. *Reconstruction*: a token's experts are ranked by
applied weight; k' is half of k (four of eight, whose union over 32 tokens of LLaDA2.0-mini was
published as 43.5 experts, that of DES-Seq as about 41); a pool of fewer than k experts is filled
with those of most weight.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled.altered.reroute.rule import Reroute, Routed, best, require_share


@dataclasses.dataclass(frozen=True, slots=True)
class DesSeq(Reroute):
    """`seeds`: the share of a token's experts that it brings into the pool, one at least."""

    seeds: float = 0.5

    def __post_init__(self) -> None:
        require_share(self.seeds, "seeds")

    def pool(self, routed: Routed) -> NDArray[np.bool_]:
        count = max(1, round(self.seeds * routed.top_k))
        weights = np.where(routed.real, routed.weights, -np.inf)
        rank = np.argsort(np.argsort(-weights, axis=1, kind="stable"), axis=1, kind="stable")
        votes = routed.votes()
        pool = routed.votes(rank < count) > 0
        missing = routed.top_k - int(pool.sum())
        return pool if missing <= 0 else pool | best(np.where(pool, -1.0, votes), missing)
