"""Least-Stale: what this forward has not touched leaves first, then first in, first out (SpecMD).

arXiv 2602.03921; the order of victims read in the replay code of arXiv 2609.04895: experts
untouched in the current forward before touched ones, inside these the layer whose next turn is
farthest ahead, inside a layer the one that entered first. With slots per layer only the last rule
is left: FIFO over the inactive residents. arXiv 2608.07911 reports that its gains vanish under a
corrected replay.

The layer's next turn is its last one plus a forward's layers, so a score only changes when its
layer is executed, and for all layers when a forward begins. Cost: O(E) a step, O(L * E) a forward.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Retention
from oled.policies.struct import Matrix, Mutable

TURN = 2.0**26
"""One layer-step in a score; below it the order of entry."""


class Turns(Memory):
    """When experts entered, and which the running forward has touched."""

    entered: Matrix[np.float64]  # [L, E] clock of the first use since; 0: not on the GPU
    touched: Matrix[np.float64]  # [L, E] 1 if used in the running forward
    forward: Mutable[float] = 0.0  # the running forward + 1


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: Turns, params: LeastStale) -> None:
    layers = cache.num_experts.size
    touched = memory.touched
    if memory.forward != 1.0 + step.forward:  # a new forward has touched nothing yet
        memory.forward = 1.0 + step.forward
        for layer in range(layers):
            for expert in range(cache.num_experts[layer]):
                cache.score[layer, expert] -= touched[layer, expert] * layers * TURN
                touched[layer, expert] = 0.0
    layer = step.layer
    entered, next_turn = memory.entered[layer], float(step.clock + layers)
    for expert in range(cache.num_experts[layer]):
        if cache.resident[layer, expert] == 0:
            entered[expert] = 0.0
    for i in range(step.expert.size):
        expert = step.expert[i]
        touched[layer, expert] = 1.0
        if entered[expert] == 0.0 and cache.resident[layer, expert] == 0:
            entered[expert] = float(step.clock)
    for expert in range(cache.num_experts[layer]):
        turn = next_turn - touched[layer, expert] * layers
        cache.score[layer, expert] = entered[expert] - turn * TURN


@dataclasses.dataclass(frozen=True, slots=True)
class LeastStale(Retention):
    """Untouched in this forward, then farthest ahead, then first in."""

    needs = frozenset({"order"})
    observe = observe

    def memory(self, layers: int, experts: int) -> Turns:
        shape = (layers, experts)
        return Turns(entered=np.zeros(shape), touched=np.zeros(shape))
