"""A sub-additive floor under a measured table, so that a lower bound may merge launch groups."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def subadditive_minorant(table: NDArray[np.int64], top_k: int) -> NDArray[np.int64]:
    """The largest f(n) <= table[:, n] with f(a + b) <= f(a) + f(b), spread over all tokens.

    Measured groups of few experts may be too fast (weights served from L2), so that two of them
    undercut one of twice the size; a bound that computes all experts in one group needs this floor.

    Args: table: int64[tokens + 1, active + 1]; n active experts have at least ceil(n / top_k)
        tokens. Returns: int64[tokens + 1, active + 1].
    """
    tokens, active = table.shape
    floor = np.zeros(active, dtype=np.int64)
    for n in range(1, active):
        fewest = min(-(-n // top_k), tokens - 1)
        floor[n] = table[fewest:, n].min()
        if n > 1:
            splits = floor[1 : n // 2 + 1] + floor[n - 1 : n - 1 - n // 2 : -1]
            floor[n] = min(floor[n], int(splits.min()))
    return np.ascontiguousarray(np.broadcast_to(floor, table.shape))
