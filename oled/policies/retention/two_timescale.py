"""Two timescales (ours): OLED's priority of this forward plus a little of the slow activity.

score = p + weight * activity, with p the priority of the current forward (see `priority`, nothing
kept) and activity = keep * activity + (1 - keep) * [active in this forward], one a layer-step. The
priority ranks the active experts; the slow part ranks the others, which under `priority` tie at
zero and fall to recency. Cost: O(E) a step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.policies.interface import CONF_MASKED, GATE, GATE_MASKED, OBSERVE, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Retention
from oled.policies.struct import Matrix


class Activity(Memory):
    """The slow part of the score."""

    activity: Matrix[np.float64]  # [L, E]


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: Activity, params: TwoTimescale) -> None:
    weight, keep = params.weight, params.keep
    layer = step.layer
    activity, score = memory.activity[layer], cache.score[layer]
    for expert in range(cache.num_experts[layer]):
        activity[expert] *= keep
        score[expert] = weight * activity[expert]
    for i in range(step.expert.size):
        expert = step.expert[i]
        activity[expert] += 1.0 - keep
        opened = step.mass[i, GATE] - step.mass[i, GATE_MASKED]
        priority = step.mass[i, CONF_MASKED] + opened
        score[expert] = priority + weight * activity[expert]


@dataclasses.dataclass(frozen=True, slots=True)
class TwoTimescale(Retention):
    """Confidence x gate weight of the current forward, and slow activity.

    weight: of the activity, which lies in [0, 1].
    keep: share of the old activity kept, 0 <= keep < 1.
    """

    weight: float = 0.1
    keep: float = 0.95

    needs = frozenset({"order", "weights", "confidence"})
    observe = observe

    def __post_init__(self) -> None:
        if self.weight < 0.0:
            raise ValueError(f"weight is {self.weight}; it must not be negative")
        if not 0.0 <= self.keep < 1.0:
            raise ValueError(f"keep is {self.keep}; it must lie in [0, 1)")

    def memory(self, layers: int, experts: int) -> Activity:
        return Activity(activity=np.zeros((layers, experts)))
