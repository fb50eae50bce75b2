"""What several dispatchers do with the misses of a step: order, rate and split them."""

from __future__ import annotations

from oled._jit import jitable
from oled.policies.interface import ABSENT, ON_CPU, TRANSFER, Cache, Plan, Step
from oled.policies.selection import sort_lowest


@jitable
def by_tokens(step: Step, cache: Cache, plan: Plan) -> int:
    """Places of the misses into `cache.item`, most tokens first, then by id; how many there are."""
    n = 0
    for i in range(step.expert.size):
        if plan.state[i] == ABSENT:
            cache.key[n], cache.age[n], cache.item[n] = -step.count[i], i, i
            n += 1
    sort_lowest(cache.key, cache.age, cache.item, n)
    return n


@jitable
def predict_reuse(step: Step, cache: Cache, misses: int) -> None:
    """Scores of the misses in `cache.item`, scaled to 0..1, into `cache.key` in the same order."""
    lowest = cache.score[step.layer, step.expert[cache.item[0]]]
    highest = lowest
    for j in range(misses):
        score = cache.score[step.layer, step.expert[cache.item[j]]]
        lowest, highest = min(lowest, score), max(highest, score)
        cache.key[j] = score
    span = highest - lowest
    for j in range(misses):
        cache.key[j] = (cache.key[j] - lowest) / span if span > 0.0 else 0.0


@jitable
def split(cache: Cache, plan: Plan, misses: int, transfers: int) -> None:
    """Copy the first `transfers` of `cache.item`, in this order; the others run on the CPU."""
    for j in range(misses):
        i = cache.item[j]
        plan.place[i] = TRANSFER if j < transfers else ON_CPU
        plan.rank[i] = j
