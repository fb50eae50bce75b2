"""State-weighted gate (ours): gate weight in which masked tokens count less than opened ones.

s(e) = gate weight of opened tokens (decoded, prompt) + masked * gate weight of masked tokens;
score = smoothing * score + (1 - smoothing) * s. An opened token keeps its route, a masked one
loses it when it is opened, whatever its confidence: so a constant takes the place of OLED's
confidence. It is the control for any claim about confidence. Without token states (autoregressive
traces) it equals the gate sum. Ties fall to recency. Cost: O(E) a step.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import GATE, GATE_MASKED, OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: StateGate) -> None:
    masked, smoothing = params.masked, params.smoothing
    for expert in range(cache.num_experts[step.layer]):
        cache.score[step.layer, expert] *= smoothing
    for i in range(step.expert.size):
        opened = step.mass[i, GATE] - step.mass[i, GATE_MASKED]
        weight = opened + masked * step.mass[i, GATE_MASKED]
        cache.score[step.layer, step.expert[i]] += (1.0 - smoothing) * weight


@dataclasses.dataclass(frozen=True, slots=True)
class StateGate(Retention):
    """Gate weight by token state of the current forward, smoothed.

    masked: what a masked token counts, 0 <= masked <= 1; an opened one counts 1.
    smoothing: share of the old score kept, 0 <= smoothing < 1; 0 forgets at once.
    """

    masked: float = 0.1
    smoothing: float = 0.0

    needs = frozenset({"order", "weights"})
    observe = observe

    def __post_init__(self) -> None:
        if not 0.0 <= self.masked <= 1.0:
            raise ValueError(f"masked is {self.masked}; it must lie in [0, 1]")
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing is {self.smoothing}; it must lie in [0, 1)")
