"""Expert count: the expert that the fewest tokens of this forward chose leaves first.

count(e) = tokens routed to e; score = smoothing * score + (1 - smoothing) * count. Without
smoothing this is the ranking by which TIDE (arXiv 2605.20179; read in its code at 5611ace) chooses
residents: the current step's token counts, no history and no gate weights; *when* TIDE refreshes
is dispatch. Experts that were not active tie at zero (in TIDE the surplus leaves in arbitrary
order): here the least recently used leaves first. Cost: O(E) a step.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: ExpertCount) -> None:
    smoothing = params.smoothing
    for expert in range(cache.num_experts[step.layer]):
        cache.score[step.layer, expert] *= smoothing
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] += (1.0 - smoothing) * step.count[i]


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertCount(Retention):
    """Tokens of the current forward, smoothed.

    smoothing: share of the old score kept, 0 <= smoothing < 1; 0 forgets at once.
    """

    smoothing: float = 0.0

    needs = frozenset({"order"})
    observe = observe

    def __post_init__(self) -> None:
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing is {self.smoothing}; it must lie in [0, 1)")
