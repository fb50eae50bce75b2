"""MRS (minus recent score): HybriMoE's score-aware retention (arXiv 2504.05897).

S <- alpha * TopP(s) + (1 - alpha) * S, with s the router's scores and TopP keeping the p highest
(the others count 0); the lowest S of a layer leaves first. Read in code (PKU-SEC-Lab/HybriMoE at
508a85b): alpha 0.5, p 12, one token. The paper's p is about twice the active experts, which for
one token of the models in that code is 12.
*Reconstruction*: a forward of many tokens, which the code does not have (it looks at the first
token only), counts with its mean score; `per_active` makes p grow with the active set. Ties at the
border of TopP go to the lower ids. Cost: O(E) a step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled._jit import jitable
from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Retention
from oled.policies.struct import Vector


class Scratch(Memory):
    """Room to rank scores."""

    values: Vector[np.float64]  # [E]


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: Scratch, params: Mrs) -> None:
    alpha = params.alpha
    experts = cache.num_experts[step.layer]
    kept = min(int(max(params.top, params.per_active * step.expert.size)), experts)
    values = memory.values
    for expert in range(experts):
        values[expert] = step.scores[expert]
    border = highest(values, experts, kept)
    at_border = kept
    for expert in range(experts):
        if step.scores[expert] > border:
            at_border -= 1
    for expert in range(experts):
        score = (1.0 - alpha) * cache.score[step.layer, expert]
        if step.scores[expert] > border:
            score += alpha * step.scores[expert]
        elif step.scores[expert] == border and at_border > 0:
            score += alpha * step.scores[expert]
            at_border -= 1
        cache.score[step.layer, expert] = score


@jitable
def highest(values: NDArray[np.float64], n: int, rank: int) -> float:
    """The `rank`-th highest (1: the maximum) of the first `n` values; permutes them."""
    left, right, wanted = 0, n - 1, rank - 1
    while left < right:
        pivot = values[(left + right) // 2]
        i, j = left, right
        while i <= j:
            while values[i] > pivot:
                i += 1
            while pivot > values[j]:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if wanted <= j:
            right = j
        elif wanted >= i:
            left = i
        else:
            break
    return float(values[wanted])


@dataclasses.dataclass(frozen=True, slots=True)
class Mrs(Retention):
    """Recent router scores of the best experts.

    alpha: weight of the current forward, 0 < alpha <= 1.
    top: p, the scores that count in a forward, at least 1.
    per_active: p is at least this many times the active experts; 0 leaves it at `top`.
    """

    alpha: float = 0.5
    top: int = 12
    per_active: float = 0.0

    needs = frozenset({"order", "scores"})
    observe = observe

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise ValueError(f"alpha is {self.alpha}; it must lie in (0, 1]")
        if self.top < 1 or self.per_active < 0.0:
            raise ValueError(
                f"top is {self.top} and per_active {self.per_active}; "
                "top must be at least 1 and per_active not negative"
            )

    def memory(self, layers: int, experts: int) -> Scratch:
        return Scratch(values=np.zeros(experts))
