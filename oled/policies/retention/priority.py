"""OLED priority: confidence x gate weight (arXiv 2609.33385; the formula is a *reconstruction*).

p(e) = sum over the forward's tokens of c_t * g_te, g normalised over the token's top-k. A
confident token is unlikely to change its route, so an expert that confident tokens weigh heavily
will be asked for again. Smoothed over forwards: score = smoothing * score + (1 - smoothing) * p.
Tokens already opened count as c = 1, or with their own confidence from the logits. Prompt tokens
count as 1. Ties (all experts that were not active, without smoothing) fall to recency. Cost: O(E)
a step.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import (
    CONF_MASKED,
    CONF_OPENED,
    GATE,
    GATE_MASKED,
    OBSERVE,
    Cache,
    Step,
)
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: Priority) -> None:
    smoothing = params.smoothing
    for expert in range(cache.num_experts[step.layer]):
        cache.score[step.layer, expert] *= smoothing
    for i in range(step.expert.size):
        opened = step.mass[i, GATE] - step.mass[i, GATE_MASKED]
        if params.opened_from_logits:
            opened = step.mass[i, CONF_OPENED]
        priority = step.mass[i, CONF_MASKED] + opened
        cache.score[step.layer, step.expert[i]] += (1.0 - smoothing) * priority


@dataclasses.dataclass(frozen=True, slots=True)
class Priority(Retention):
    """Confidence x gate weight of the current forward, smoothed.

    smoothing: share of the old score kept, 0 <= smoothing < 1; 0 forgets at once.
    opened_from_logits: opened tokens count with their own confidence instead of 1.
    """

    smoothing: float = 0.0
    opened_from_logits: bool = False

    needs = frozenset({"order", "weights", "confidence"})
    observe = observe

    def __post_init__(self) -> None:
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing is {self.smoothing}; it must lie in [0, 1)")
