"""LRFU: recency and frequency in one (Lee et al., IEEE ToC 2001): the lowest CRF leaves first.

CRF(e) = sum over the forwards that used e of (1/2)^(rate * age), age in forwards. rate 0 is LFU,
rate 1 is LRU. Kept by multiplying a layer's scores by (1/2)^rate once a layer-step: no powers, so
it is the same number with and without JIT. An expert counts once a layer-step, however many tokens
chose it; experts that left the cache keep their CRF. Replays of MoE caches use rate 0.5 (read in
the code of arXiv 2609.04895). Cost: O(E) a step.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention
from oled.policies.struct import Struct


class Fading(Struct):
    """What the kernel needs of the rate."""

    fading: float  # of a score, each layer-step


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: Fading) -> None:
    for expert in range(cache.num_experts[step.layer]):
        cache.score[step.layer, expert] *= params.fading
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] += 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Lrfu(Retention):
    """Combined recency and frequency.

    rate: the paper's lambda, 0 <= rate <= 1; a use weighs half as much after 1 / rate forwards.
    """

    rate: float = 0.5

    needs = frozenset({"order"})
    observe = observe

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"rate is {self.rate}; it must lie in [0, 1]")

    def params(self) -> Fading:
        return Fading(fading=0.5**self.rate)
