"""Last stage: the experts that were used most in the stage just finished stay for the next (SAEM).

Source: arXiv 2608.21614 (summaries; no code was found). The working set of a reasoning stage is
that of the one before (about 89 % in the paper), so at a boundary the cache is reset to the experts
with the most activations of the finished stage, and nothing migrates within a stage. The cache of
the first stage comes from a calibration trace. *Reconstruction*: a stage is what `Step.block`
numbers, so a block in block diffusion; activations are tokens; each layer is reset at its first
step of the new stage; the prompt belongs to no stage: it keeps the residents that it finds and its
tokens do not count; of equally used experts a resident comes first, then the one used last. That
nothing else enters needs `admission: compete`. Cost: O(A) a step, O(E) by selection at a boundary.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Retention
from oled.policies.stage import PROMPT, hold, stage_of
from oled.policies.struct import Matrix, Vector


class Finished(Memory):
    """What the running stage has used."""

    tokens: Matrix[np.float64]  # [L, E]
    stage: Vector[np.float64]  # [L] the running stage; 0: none yet


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: Finished, params: LastStage) -> None:
    layer, stage = step.layer, stage_of(step)
    tokens, running = memory.tokens[layer], memory.stage[layer]
    if stage != running:
        if running == 0.0:
            hold(layer, cache, cache.prior[layer])
        elif running > PROMPT:
            hold(layer, cache, tokens)
        for expert in range(cache.num_experts[layer]):
            tokens[expert] = 0.0
        memory.stage[layer] = stage
    if stage > PROMPT:
        for i in range(step.expert.size):
            tokens[step.expert[i]] += step.count[i]


@dataclasses.dataclass(frozen=True, slots=True)
class LastStage(Retention):
    """Most used in the last stage; frozen until the next boundary."""

    needs = frozenset({"order", "stages", "calibration"})
    observe = observe

    def memory(self, layers: int, experts: int) -> Finished:
        return Finished(tokens=np.zeros((layers, experts)), stage=np.zeros(layers))
