"""Standby copies put to use for one step: which rank serves how many tokens of which expert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from oled.parallel.layout import Layout
from oled.parallel.placement import LayerStep
from oled.parallel.prices import Prices
from oled.types import Ints


def activate(step: LayerStep, layout: Layout, prices: Prices) -> Ints:
    """Return how many tokens each rank serves of each expert, i64[R, E].

    From all at the first copies on; each change lowers the busiest rank's time.
    """
    layer, holds = step.layer, layout.holds[step.layer]
    amount = np.zeros(holds.shape, np.int64)
    counts = np.bincount(step.expert[step.expert >= 0], minlength=holds.shape[1])
    known = np.flatnonzero(layout.primary[layer] >= 0)
    amount[layout.primary[layer][known], known] = counts[known]
    pairs, active = amount.sum(axis=1), (amount > 0).sum(axis=1)
    time = prices.group_ns(layer, pairs, active)
    movable = holds.sum(axis=0) > 1
    while True:
        busiest = int(np.argmax(time))
        best = (int(time[busiest]), -1, -1, 0)  # the slower of the two, expert, rank, tokens
        for expert, rank, moved in _choices(amount, holds, movable, busiest):
            both = np.array([busiest, rank])
            gone, new = moved == amount[busiest, expert], amount[rank, expert] == 0
            after = prices.group_ns(
                layer, pairs[both] + (-moved, moved), active[both] + (-int(gone), int(new))
            )
            if after.max() < best[0]:
                best = (int(after.max()), expert, rank, moved)
        _, expert, rank, moved = best
        if expert < 0:
            return amount
        amount[busiest, expert] -= moved
        amount[rank, expert] += moved
        for changed in (busiest, rank):
            pairs[changed] = amount[changed].sum()
            active[changed] = np.count_nonzero(amount[changed])
            time[changed] = prices.group_ns(layer, pairs[changed], active[changed])


def _choices(
    amount: Ints, holds: NDArray[np.bool_], movable: NDArray[np.bool_], busiest: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, rank, tokens): all or half of an expert's tokens to another of its ranks."""
    for expert in np.flatnonzero(movable & (amount[busiest] > 0)).tolist():
        tokens = int(amount[busiest, expert])
        for rank in np.flatnonzero(holds[:, expert]).tolist():
            if rank != busiest:
                yield expert, rank, tokens
                if tokens > 1:
                    yield expert, rank, tokens // 2


def spread(step: LayerStep, first: Ints, amount: Ints) -> Ints:
    """Return the rank that serves each (token, slot) [T, k]; `first` [T, k]: the first copies'.

    Where tokens of an expert were moved, those that live on a rank that serves some go first.
    """
    served = first.copy()
    flat, expert = served.reshape(-1), step.expert.reshape(-1)
    home = np.repeat(step.home, step.expert.shape[1])
    stays = np.zeros_like(amount)
    np.add.at(stays, (flat[expert >= 0], expert[expert >= 0]), 1)
    for e in np.flatnonzero((stays != amount).any(axis=0)).tolist():
        left, rest = amount[:, e].copy(), []
        for place in np.flatnonzero(expert == e).tolist():
            if left[home[place]] > 0:
                flat[place] = home[place]
                left[home[place]] -= 1
            else:
                rest.append(place)
        flat[rest] = np.repeat(np.arange(left.size), left)
    return served
