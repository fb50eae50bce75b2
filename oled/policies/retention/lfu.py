"""LFU: the expert used in the fewest layer-steps so far leaves first; ties to the least recent.

Counts are kept for experts that left the cache (they are what makes LFU slow to adapt). An expert
counts once a layer-step, however many tokens chose it. Aged LFU: every `period` forwards all counts
are multiplied by `decay` (LFU with dynamic aging in its plainest form). Cost: O(A) a step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Retention
from oled.policies.struct import Vector


class Age(Memory):
    """Forwards since the counts were last decayed."""

    forwards: Vector[np.float64]  # [L]


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: Age, params: Lfu) -> None:
    if params.decay < 1.0:
        memory.forwards[step.layer] += 1.0
        if memory.forwards[step.layer] >= params.period:
            memory.forwards[step.layer] = 0.0
            for expert in range(cache.num_experts[step.layer]):
                cache.score[step.layer, expert] *= params.decay
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] += 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Lfu(Retention):
    """Least frequently used; decay 1 never forgets."""

    decay: float = 1.0
    period: float = 32.0

    needs = frozenset({"order"})
    observe = observe

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0 or self.period < 1:
            raise ValueError(
                f"decay is {self.decay} and period {self.period}; "
                "decay must lie in [0, 1] and period be at least 1 forward"
            )

    def memory(self, layers: int, experts: int) -> Age:
        return Age(forwards=np.zeros(layers))
