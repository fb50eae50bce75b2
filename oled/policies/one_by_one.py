"""Naive replay: the experts of a step are served one after the other; no set is atomic."""

from __future__ import annotations

import numpy as np

from oled._jit import jitable, shared_njit
from oled.policies.admission import drop, insert
from oled.policies.interface import (
    ABSENT,
    ON_GPU,
    RESIDENT,
    STAMP_STEP,
    TRANSFER,
    Cache,
    Plan,
    Step,
)
from oled.policies.selection import sort_by_rank


@shared_njit
def remember(step: Step, cache: Cache) -> None:
    """Keep the layer's scores and stamps of before this step, for `serve_one_by_one`."""
    for expert in range(cache.num_experts[step.layer]):
        cache.key[expert] = cache.score[step.layer, expert]
        cache.age[expert] = cache.stamp[step.layer, expert]


@jitable
def serve_one_by_one(step: Step, cache: Cache, plan: Plan, by_mention: bool) -> None:
    """Naive replay: experts one after the other, in id order or in the order of their last mention.

    Fills the whole plan. An expert evicted before its turn is a miss, and a victim may be one that
    was served a moment ago; both are what an executor without an atomic active set does. Recency
    is the order of service. Needs `remember` before the scores changed: until its turn an expert
    keeps its old score.
    """
    layer, n = step.layer, step.expert.size
    for i in range(n):
        plan.order[i] = i
        plan.rank[i] = step.last_token[i] if by_mention else i
    sort_by_rank(plan.order, plan.rank, 0, n)
    for turn in range(n):
        i = plan.order[turn]
        expert = np.int64(step.expert[i])
        if cache.resident[layer, expert] != 0:
            plan.state[i], plan.place[i] = RESIDENT, ON_GPU
        else:
            if plan.state[i] == RESIDENT:  # evicted before its turn: nothing computes in its slot
                plan.state[i] = ABSENT
                plan.evicted_active -= 1
            plan.place[i] = TRANSFER if plan.state[i] == ABSENT else ON_GPU
            while cache.used[layer] > 0 and cache.used[layer] >= cache.capacity[layer]:
                drop(_victim(layer, cache), step, cache, plan)
            if cache.used[layer] < cache.capacity[layer]:
                plan.stays[i] = 1
                insert(layer, expert, cache)
        cache.stamp[layer, expert] = step.clock * STAMP_STEP + turn
        cache.key[expert] = cache.score[layer, expert]
        cache.age[expert] = cache.stamp[layer, expert]
    for i in range(n):
        plan.rank[i] = step.last_token[i] if by_mention else i


@jitable
def _victim(layer: int, cache: Cache) -> int:
    best = -1
    for expert in range(cache.num_experts[layer]):
        if cache.resident[layer, expert] != 0 and (
            best < 0
            or cache.key[expert] < cache.key[best]
            or (cache.key[expert] == cache.key[best] and cache.age[expert] < cache.age[best])
        ):
            best = expert
    return best
