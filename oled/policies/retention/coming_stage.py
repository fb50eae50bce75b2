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

from oled.policies.interface import OBSERVE, PREFILL, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Retention
from oled.policies.stage import hold
from oled.policies.struct import Cube, Vector

if TYPE_CHECKING:
    from oled.trace.steps import Steps


class Stages(Memory):
    """The tokens of all stages, and where each layer stands."""

    tokens: Cube[np.float64]  # [stage, L, E] per expert, in the order of the stages
    coming: Vector[np.float64]  # [L] the stage that comes next
    left: Vector[np.float64]  # [L] tokens left of the running one


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: Stages, params: ComingStage) -> None:
    if step.phase == PREFILL or step.expert.size == 0:
        return
    layer = step.layer
    while memory.left[layer] == 0.0:
        coming = memory.tokens[int(memory.coming[layer]), layer]
        for expert in range(cache.num_experts[layer]):
            memory.left[layer] += coming[expert]
        memory.coming[layer] += 1.0
        hold(layer, cache, coming)
    for i in range(step.expert.size):
        memory.left[layer] -= step.count[i]


@dataclasses.dataclass(frozen=True, slots=True)
class ComingStage(Retention):
    """Most used in the stage that begins; frozen until the next boundary."""

    needs = frozenset({"order", "stages", "calibration", "future"})
    learned = True
    observe = observe

    def first_memory(self, steps: Steps) -> Stages:
        """Return the tokens of all stages, none of which has begun."""
        generated = steps.phase != PREFILL
        keys = np.stack([steps.request, steps.block, generated])
        begins = np.append(True, (np.diff(keys) != 0).any(axis=0)) & generated
        stage = np.cumsum(begins) - 1
        tokens = np.zeros((int(begins.sum()), steps.num_layers, int(steps.num_experts.max())))
        step = np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))
        counted = generated[steps.forward[step]]
        step = step[counted]
        where = (stage[steps.forward[step]], steps.layer[step], steps.expert[counted])
        np.add.at(tokens, where, steps.count[counted])
        layers = np.zeros(steps.num_layers)
        return Stages(tokens=tokens, coming=layers, left=layers)
