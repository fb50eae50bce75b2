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

from oled.policies.interface import OBSERVE, Cache, Step, kernel
from oled.policies.part import Retention

ENTERED, TOUCHED, FORWARD = 0, 1, 2
TURN = 2.0**26
"""One layer-step in a score; below it the order of entry."""


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    layers = cache.num_experts.size
    touched = memory[TOUCHED]
    if memory[FORWARD, 0, 0] != 1.0 + step.forward:  # a new forward has touched nothing yet
        memory[FORWARD, 0, 0] = 1.0 + step.forward
        for layer in range(layers):
            for expert in range(cache.num_experts[layer]):
                cache.score[layer, expert] -= touched[layer, expert] * layers * TURN
                touched[layer, expert] = 0.0
    layer = step.layer
    entered, next_turn = memory[ENTERED, layer], float(step.clock + layers)
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

    def memory_shape(self, layers: int, experts: int) -> tuple[int, int, int]:
        return (3, layers, experts)
