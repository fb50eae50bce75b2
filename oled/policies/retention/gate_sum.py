"""Gate sum: the expert with the least gate weight in this forward leaves first.

g(e) = sum over the forward's tokens of the gate weight, normalised over the token's top-k; score =
smoothing * score + (1 - smoothing) * g. OLED's priority without the confidence: the control that
shows what confidence adds (`state_gate` is the other). Ties fall to recency. Cost: O(E) a step.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import GATE, OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: GateSum) -> None:
    smoothing = params.smoothing
    for expert in range(cache.num_experts[step.layer]):
        cache.score[step.layer, expert] *= smoothing
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] += (1.0 - smoothing) * step.mass[i, GATE]


@dataclasses.dataclass(frozen=True, slots=True)
class GateSum(Retention):
    """Gate weight of the current forward, smoothed.

    smoothing: share of the old score kept, 0 <= smoothing < 1; 0 forgets at once.
    """

    smoothing: float = 0.0

    needs = frozenset({"order", "weights"})
    observe = observe

    def __post_init__(self) -> None:
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing is {self.smoothing}; it must lie in [0, 1)")
