"""What several dispatchers do with the misses of a step: put them in order, and split the order."""

from __future__ import annotations

from oled._jit import inner_njit
from oled.policies.interface import ABSENT, ON_CPU, TRANSFER, Cache, Plan, Step
from oled.policies.selection import sort_lowest


@inner_njit
def by_tokens(step: Step, cache: Cache, plan: Plan) -> int:
    """Places of the misses into `cache.item`, most tokens first, then by id; how many there are."""
    n = 0
    for i in range(step.expert.size):
        if plan.state[i] == ABSENT:
            cache.key[n], cache.age[n], cache.item[n] = -step.count[i], i, i
            n += 1
    sort_lowest(cache.key, cache.age, cache.item, n)
    return n


@inner_njit
def split(cache: Cache, plan: Plan, misses: int, transfers: int) -> None:
    """Copy the first `transfers` of `cache.item`, in this order; the others run on the CPU."""
    for j in range(misses):
        i = cache.item[j]
        plan.place[i] = TRANSFER if j < transfers else ON_CPU
        plan.rank[i] = j
