"""In-cache LFU: the expert with the fewest visits while cached leaves first (MoE-Infinity).

arXiv 2401.14361; read in code (EfficientMoE/MoE-Infinity, core/parallel/expert_dispatcher.cpp):
every expert that a layer executes is counted once, the fetch included, and the least counted
expert on the GPU is evicted; counts are cleared with each request. The count is forgotten on
eviction, as in the task pool of the same code; the dispatcher alone keeps it, which is `lfu`. Ties
there go by the order of a hash table, here to the least recently used. In lifecycle `persistent`
counts live as long as the residency. Cost: O(E) a step.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: InCacheLfu) -> None:
    for expert in range(cache.num_experts[step.layer]):
        if cache.resident[step.layer, expert] == 0:
            cache.score[step.layer, expert] = 0.0
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] += 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class InCacheLfu(Retention):
    """Visits since the expert entered the cache."""

    needs = frozenset({"order"})
    observe = observe
