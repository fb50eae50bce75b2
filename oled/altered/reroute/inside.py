"""Tokens routed again inside a pool.

A token keeps those of its own experts that are in the pool, in their order; each one that it loses
is replaced by the best expert of the pool that it does not have, by the score that the router
chooses by. Where routers limit a token to some groups of experts the limit does not hold for
replacements. A replacement's weight is its score in the units of the token's own weights (their sum
over the sum of their scores); then the token's weights are scaled to add up to what they did,
unless the model leaves them as they are. Where no score of the pool's other experts is known, a
slot stays unused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.altered.reroute.rule import UNKNOWN, Routed
from oled.trace.schema import NO_EXPERT
from oled.types import Doubles


def route_inside(
    routed: Routed, pool: NDArray[np.bool_], *, renormalise: bool
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return new ids and weights [T, k]; unused slots have NO_EXPERT and weight 0.

    pool: [E]. renormalise: whether a token's weights add up to a constant in this model. A token
    all of whose experts are in the pool keeps ids and weights to the bit.
    """
    ids, real = routed.ids, routed.real
    in_use = ids != NO_EXPERT
    stays = in_use & (~real | pool[np.where(real, ids, 0)])
    kept, used = (mask.sum(axis=1, keepdims=True) for mask in (stays, in_use))
    order = np.argsort(~stays, axis=1, kind="stable")
    slot = np.arange(routed.top_k)
    new_ids = np.where(slot < kept, np.take_along_axis(ids, order, axis=1), NO_EXPERT)
    own_weights = np.take_along_axis(routed.weights, order, axis=1).astype(np.float64)
    weights: Doubles = np.where(slot < kept, own_weights, 0.0)

    newcomer, worth = _replacements(routed, pool, stays & real)
    place = np.maximum(slot - kept, 0)  # the token's first newcomer goes to its first free slot
    coming = np.take_along_axis(newcomer, place, axis=1)
    worth = np.take_along_axis(worth, place, axis=1)
    taken = (slot >= kept) & (slot < used) & (worth > UNKNOWN)
    new_ids = np.where(taken, coming, new_ids)
    weights = np.where(taken, worth, weights)
    if renormalise:
        weights = weights * _ratio(routed.weights, weights)
    whole = kept == used
    new_ids, weights = np.where(whole, ids, new_ids), np.where(whole, routed.weights, weights)
    return new_ids, weights.astype(np.float32)


def _replacements(
    routed: Routed, pool: NDArray[np.bool_], kept: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], Doubles]:
    """Return each token's k best other experts of the pool and their weights, UNKNOWN if none."""
    row = np.arange(len(routed.ids))[:, None]
    candidates = np.where(pool, routed.chosen_by, UNKNOWN)
    token, slot = np.nonzero(kept)
    candidates[token, routed.ids[token, slot]] = UNKNOWN
    best = np.argsort(-candidates, axis=1, kind="stable")[:, : routed.top_k]
    own = routed.scores[row, np.where(routed.real, routed.ids, 0)]
    known = routed.real & (own > UNKNOWN)
    unit = _ratio(np.where(known, routed.weights, 0.0), np.where(known, own, 0.0))
    possible = (candidates[row, best] > UNKNOWN) & known.any(axis=1, keepdims=True)
    worth = np.where(possible, routed.scores[row, best], 0.0) * unit
    return best, np.where(possible, worth, UNKNOWN)


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> Doubles:
    """Return sum over sum of each row [T, 1], 1 where there is nothing to divide by."""
    above, below = (x.sum(axis=1, keepdims=True, dtype=np.float64) for x in (over, under))
    ratio: Doubles = np.divide(above, below, out=np.ones_like(below), where=below > 0)
    return ratio
