"""Windowed workload: every few forwards a few residents make room for busier experts (DALI).

arXiv 2602.03495: every w steps, u experts of a layer are swapped by their workload (tokens) in the
window. No code is public and w and u are not known. *Reconstruction*: after each window the
members of a layer are its residents, of which at most `swaps` are exchanged, the least busy for
the busiest other expert as long as that one has more tokens in the window. Members score 1 + their
tokens, others 0, until the next window ends; a new member enters when it is next transferred.
During the first window recency decides alone. Equally busy experts are exchanged in the order of
ids. Cost: O(A) a step, O(swaps * E) a window.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled._jit import jitable
from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Retention
from oled.policies.struct import Matrix, Vector


class Window(Memory):
    """The running window."""

    tokens: Matrix[np.float64]  # [L, E]
    forwards: Vector[np.float64]  # [L] of it so far


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: Window, params: Windowed) -> None:
    layer = step.layer
    tokens = memory.tokens[layer]
    for i in range(step.expert.size):
        tokens[step.expert[i]] += step.count[i]
    memory.forwards[layer] += 1.0
    if memory.forwards[layer] < params.window:
        return
    for expert in range(cache.num_experts[layer]):
        resident = cache.resident[layer, expert] != 0
        cache.score[layer, expert] = 1.0 + tokens[expert] if resident else 0.0
    for _ in range(params.swaps):
        if not swap(layer, cache, tokens):
            break
    for expert in range(cache.num_experts[layer]):
        tokens[expert] = 0.0
    memory.forwards[layer] = 0.0


@jitable
def swap(layer: int, cache: Cache, tokens: NDArray[np.float64]) -> bool:
    """Exchange the least busy member for the busiest other expert, if that one is busier."""
    least, most = -1, -1
    for expert in range(cache.num_experts[layer]):
        if cache.score[layer, expert] > 0.0:
            if least < 0 or tokens[expert] < tokens[least]:
                least = expert
        elif most < 0 or tokens[expert] > tokens[most]:
            most = expert
    if least < 0 or most < 0 or tokens[most] <= tokens[least]:
        return False
    cache.score[layer, most] = 1.0 + tokens[most]
    cache.score[layer, least] = 0.0
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class Windowed(Retention):
    """Tokens in the last window, few changes at a time.

    window: w, forwards of a window, at least 1.
    swaps: u, experts of a layer exchanged after a window, at least 0.
    """

    window: int = 8
    swaps: int = 8

    needs = frozenset({"order"})
    observe = observe

    def __post_init__(self) -> None:
        if self.window < 1 or self.swaps < 0:
            raise ValueError(
                f"window is {self.window} and swaps {self.swaps}; "
                "window must be at least 1 and swaps not negative"
            )

    def memory(self, layers: int, experts: int) -> Window:
        return Window(tokens=np.zeros((layers, experts)), forwards=np.zeros(layers))
