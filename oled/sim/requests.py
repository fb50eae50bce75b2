"""What happens when a request begins or ends, and when slots are given to other layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled._jit import shared_njit
from oled.policies.admission import fit_capacity
from oled.policies.interface import (
    COPYING,
    NOT_STAGED,
    PREFETCHED,
    TRANSFERRED,
    Cache,
    Plan,
    Queue,
)
from oled.sim.lanes import IDLE, MOVED, WASTED, Lanes
from oled.sim.state import Start
from oled.sim.tally import book_evicted


@shared_njit
def abandon(cache: Cache, lanes: Lanes, queue: Queue) -> None:
    """End a request: what was fetched ahead and not used since was fetched in vain.

    A copy that is on its way is given up and counts as made.
    """
    layers, experts = cache.resident.shape
    for layer in range(layers):
        for expert in range(experts):
            if cache.staged[layer, expert] == COPYING:
                lanes.moved[MOVED] += cache.expert_bytes[layer]
            if cache.staged[layer, expert] != NOT_STAGED or cache.fresh[layer, expert] & PREFETCHED:
                lanes.moved[WASTED] += cache.expert_bytes[layer]
            cache.staged[layer, expert] = NOT_STAGED
            cache.fresh[layer, expert] &= TRANSFERRED
    cache.staged_experts = 0
    queue.begin = queue.end = 0
    if lanes.link_what != IDLE:
        lanes.link_what, lanes.link_ended = IDLE, lanes.now
    lanes.paused.chunks = 0


@shared_njit
def reset(cache: Cache, start: Start) -> None:
    """Begin afresh: initial residents, scores from the prior."""
    layers, experts = cache.resident.shape
    cache.resident_bytes = 0
    for layer in range(layers):
        cache.capacity[layer] = start.capacity[layer]
        cache.used[layer] = 0
        for expert in range(experts):
            cache.fresh[layer, expert] = 0
            cache.score[layer, expert] = cache.prior[layer, expert]
            cache.stamp[layer, expert] = -1 - expert
            cache.resident[layer, expert] = start.resident[layer, expert]
            if start.resident[layer, expert] != 0:
                cache.used[layer] += 1
                cache.resident_bytes += cache.expert_bytes[layer]


@shared_njit
def clear(cells: NDArray[np.float64]) -> None:
    """Forget everything in a part's memory; its `cells` f64[n]."""
    for i in range(cells.size):
        cells[i] = 0.0


@shared_njit
def fit_capacities(cache: Cache, plan: Plan, lanes: Lanes) -> None:
    """After an allocation: layers whose capacity was cut lose their lowest residents at once."""
    plan.evictions = 0
    for layer in range(cache.capacity.size):
        fit_capacity(layer, cache, plan)
    book_evicted(cache, plan, lanes)
