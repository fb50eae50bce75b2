"""Few tokens: a miss with few tokens runs on the CPU, one with more is copied (SAEM).

Source: arXiv 2608.21614 (summaries; no code was found). Experts that are not resident and have few
tokens are computed where their weights are, which keeps them out of the cache. *Reconstruction*:
the threshold and what happens above it are not public; here such an expert is copied, and used once
unless the retention wants it. Equal tokens go in id order. Cost: O(A).
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import ABSENT, DISPATCH, ON_CPU, Cache, Costs, Plan, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Dispatch


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: FewTokens
) -> None:
    for i in range(step.expert.size):
        if plan.state[i] == ABSENT:
            if step.count[i] <= params.tokens:
                plan.place[i] = ON_CPU
            plan.rank[i] = -step.count[i]


@dataclasses.dataclass(frozen=True, slots=True)
class FewTokens(Dispatch):
    """Misses with at most `tokens` tokens on the CPU; the others are copied, most tokens first."""

    tokens: int = 4

    reads_costs = False
    dispatch = dispatch

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens is {self.tokens}; it must be at least 0")
