"""Idle-link fill (ours): misses just run on the CPU are copied in link time that is otherwise idle.

In block diffusion most of a step's experts are active again in the next forward, so an expert that
the CPU has just computed is a good guess at one that will miss again. It joins the residents when
it lands, if its score is above the lowest of them. Asked for are the experts that would win a place
if all of them landed, the highest scores first, and only until the layer's next layer-step in this
request. Demand copies go first; a copy on the link is not stopped. Cost: O(E), by selection.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import ABSENT, ASK, FILL, ON_CPU, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import is_wanted, next_step, push
from oled.policies.selection import select_lowest, sort_lowest


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: NoMemory,
    params: IdleFill,
) -> None:
    due = next_step(side, step)
    if due < 0:
        return
    layer, n = step.layer, 0
    for i in range(step.expert.size):
        computed = plan.state[i] == ABSENT and plan.place[i] == ON_CPU
        if computed and is_wanted(cache, layer, int(step.expert[i])):
            cache.item[n] = step.expert[i]
            n += 1
    if n == 0:
        return
    for expert in range(cache.num_experts[layer]):
        if cache.resident[layer, expert] != 0:
            cache.item[n] = expert
            n += 1
    for j in range(n):
        cache.key[j] = -cache.score[layer, cache.item[j]]
        cache.age[j] = -cache.stamp[layer, cache.item[j]]
    places = min(max(cache.capacity[layer], cache.used[layer]), n)  # more than the share in a pool
    select_lowest(cache.key, cache.age, cache.item, n, places)
    winners = 0
    for j in range(places):
        if cache.resident[layer, cache.item[j]] == 0:
            cache.key[winners], cache.age[winners] = cache.key[j], cache.age[j]
            cache.item[winners] = cache.item[j]
            winners += 1
    sort_lowest(cache.key, cache.age, cache.item, winners)
    for j in range(winners):
        push(queue, layer, cache.item[j], FILL, due, params.chunks)


@dataclasses.dataclass(frozen=True, slots=True)
class IdleFill(Prefetch):
    """Experts that the CPU computed become residents in the background, in `chunks` pieces each."""

    chunks: int = 1

    needs = frozenset({"order"})
    ask = ask

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks}; it must be at least 1")
