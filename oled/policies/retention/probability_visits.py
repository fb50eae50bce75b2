"""Probability x visits: the lowest product leaves first (FineMoE, arXiv 2502.05370).

Read in code (IntelliSys-Lab/FineMoE-EuroSys26 at 5c58468, core/prefetch/task_scheduler.cpp): the
expert with the lowest probability times visits-while-cached is evicted, both cleared on eviction.
There the probability is the one that FineMoE's map match predicted for the expert, and the product
is stored in an integer, which rounds most of them to 0.
*Reconstruction*: the probability is the router's own mean score in the layer's latest forward
(what a good match predicts), the product is not rounded. Cost: O(E) a step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Retention
from oled.policies.struct import Matrix


class Visits(Memory):
    """Uses since the expert entered the cache."""

    visits: Matrix[np.float64]  # [L, E]


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: Visits, params: ProbabilityVisits) -> None:
    layer = step.layer
    visits, experts = memory.visits[layer], cache.num_experts[layer]
    for expert in range(experts):
        if cache.resident[layer, expert] == 0:
            visits[expert] = 0.0
    for i in range(step.expert.size):
        visits[step.expert[i]] += 1.0
    for expert in range(experts):
        cache.score[layer, expert] = visits[expert] * step.scores[expert]


@dataclasses.dataclass(frozen=True, slots=True)
class ProbabilityVisits(Retention):
    """Router score of the latest forward times visits since the expert entered the cache."""

    needs = frozenset({"order", "scores"})
    observe = observe

    def memory(self, layers: int, experts: int) -> Visits:
        return Visits(visits=np.zeros((layers, experts)))
