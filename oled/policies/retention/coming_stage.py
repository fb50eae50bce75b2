"""Coming stage: the experts that will be used most in the stage that begins stay (SAEM's oracle).

Source: arXiv 2608.21614 compares itself with a cache that knows each stage beforehand, in the same
engine on a fixed sequence. It holds what `last_stage` would hold with the counts of the coming
stage in place of those of the finished one, and pays for the reset in the same way. No bound: it
keeps one set through a stage. *Reconstruction*: as in `last_stage`. Cost: O(A) a step, O(E) by
selection at a boundary.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oled.policies.interface import OBSERVE, PREFILL, Cache, Step, kernel
from oled.policies.part import Retention
from oled.policies.stage import hold

if TYPE_CHECKING:
    from oled.trace.steps import Steps

NEXT, LEFT, FIRST = 0, 1, 2
"""Planes of the memory [., L, E]: in the first place of a layer's row
the stage that comes next, and the tokens left of the running one; then the tokens per expert of
every stage, in order."""


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    if step.phase == PREFILL or step.expert.size == 0:
        return
    layer = step.layer
    while memory[LEFT, layer, 0] == 0.0:
        coming = memory[FIRST + int(memory[NEXT, layer, 0]), layer]
        for expert in range(cache.num_experts[layer]):
            memory[LEFT, layer, 0] += coming[expert]
        memory[NEXT, layer, 0] += 1.0
        hold(layer, cache, coming)
    for i in range(step.expert.size):
        memory[LEFT, layer, 0] -= step.count[i]


@dataclasses.dataclass(frozen=True, slots=True)
class ComingStage(Retention):
    """Most used in the stage that begins; frozen until the next boundary."""

    needs = frozenset({"order", "stages", "calibration", "future"})
    learned = True
    observe = observe

    def first_memory(self, steps: Steps) -> NDArray[np.float64]:
        """The tokens of all stages: f64[2 + stages, L, E]."""
        generated = steps.phase != PREFILL
        keys = np.stack([steps.request, steps.block, generated])
        begins = np.append(True, (np.diff(keys) != 0).any(axis=0)) & generated
        stage = np.cumsum(begins) - 1
        shape = (FIRST + int(begins.sum()), steps.num_layers, int(steps.num_experts.max()))
        memory = np.zeros(shape)
        step = np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))
        counted = generated[steps.forward[step]]
        step = step[counted]
        where = (FIRST + stage[steps.forward[step]], steps.layer[step], steps.expert[counted])
        np.add.at(memory, where, steps.count[counted])
        return memory
