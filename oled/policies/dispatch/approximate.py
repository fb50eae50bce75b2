"""Approximate: the least important misses are not computed, the others go where they end first.

Source: SPICE, arXiv 2608.21240 (abstract, summaries). A miss of low importance is approximated by
the shared expert, which is resident, and a low-rank surrogate; the others are exact, on the CPU or
copied, by estimated cost and congestion. About 3 % fall back, at 3 to 4 points of accuracy.
*Reconstruction*: importance is gate mass; misses are given up from the lowest on while those of the
layer-step have at most `share` of its mass; the others, highest mass first, go where they would end
sooner, after what was sent there before them. The surrogate costs nothing: the shared expert is
computed anyway, and a low-rank product is small. A replay shows the cost and the gate mass that was
dropped, not what becomes of the text. Cost: O(A log A).
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import (
    ABSENT,
    DISPATCH,
    DROPPED,
    GATE,
    ON_CPU,
    TRANSFER,
    Cache,
    Costs,
    Plan,
    Step,
)
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Dispatch
from oled.policies.selection import sort_lowest


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: Approximate
) -> None:
    row, misses, total = costs.layer_class[step.layer], 0, 0.0
    for i in range(step.expert.size):
        total += float(step.mass[i, GATE])  # single precision does not add up the same uncompiled
        if plan.state[i] == ABSENT:
            cache.key[misses], cache.age[misses] = step.mass[i, GATE], i
            cache.item[misses] = i
            misses += 1
    sort_lowest(cache.key, cache.age, cache.item, misses)
    given_up, left = 0, params.share * total
    while given_up < misses and cache.key[given_up] <= left:
        left -= cache.key[given_up]
        plan.place[cache.item[given_up]] = DROPPED
        given_up += 1
    link_ns, cpu_ns = costs.copy_wake_ns, costs.cpu_call_ns
    for j in range(misses - 1, given_up - 1, -1):
        i = cache.item[j]
        count = step.count[i]
        tokens = (count + costs.top_k - 1) // costs.top_k
        on_cpu = cpu_ns + costs.cpu_ns[row, count]
        copied = link_ns + costs.copy_ns[row]
        crossing = costs.act_out_ns[count] + costs.act_back_ns[count]
        if on_cpu + crossing <= copied + costs.gpu_ns[row, tokens, 1]:
            plan.place[i] = ON_CPU
            cpu_ns = on_cpu
        else:
            plan.place[i] = TRANSFER
            plan.rank[i] = -cache.key[j]
            link_ns = copied


@dataclasses.dataclass(frozen=True, slots=True)
class Approximate(Dispatch):
    """At most this `share` of a layer-step's gate mass is given up."""

    share: float = 0.03

    needs = frozenset({"weights"})
    dispatch = dispatch

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 1.0:
            raise ValueError(f"share is {self.share}; it must lie in [0, 1)")

    @property
    def drops(self) -> bool:
        return self.share > 0.0
