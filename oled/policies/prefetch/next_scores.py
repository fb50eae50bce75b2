"""Next scores: the next layer's missing experts that its retention rates highest (HybriMoE's code).

Source: PKU-SEC-Lab/HybriMoE: on another stream the code fetches the next layer's top-k by the
cache's own score (MRS), where the paper reuses the gate. Read in code: the choice; the order in
which they are fetched is *reconstruction* (highest first, equal ones by recency). The queue is
written anew at each layer. Cost: O(E), by selection.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import ASK, HOLD, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import clear, is_wanted, push, step_ahead
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
    params: NextScores,
) -> None:
    clear(queue)
    layer = step.layer + 1
    due = step_ahead(side, step, layer)
    if due < 0:
        return
    n = 0
    for expert in range(cache.num_experts[layer]):
        cache.key[n], cache.age[n] = -cache.score[layer, expert], -cache.stamp[layer, expert]
        cache.item[n] = expert
        n += 1
    wanted = min(params.width if params.width > 0 else costs.top_k, n)
    select_lowest(cache.key, cache.age, cache.item, n, wanted)
    sort_lowest(cache.key, cache.age, cache.item, wanted)
    for j in range(wanted):
        if is_wanted(cache, layer, cache.item[j]):
            push(queue, layer, cache.item[j], HOLD, due, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class NextScores(Prefetch):
    """Of the next layer's `width` highest scores (0: top-k) those that are not on the GPU."""

    width: int = 0

    needs = frozenset({"order"})
    ask = ask

    def __post_init__(self) -> None:
        if self.width < 0:
            raise ValueError(f"width is {self.width}; it must be at least 0")
