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

from oled.policies.interface import OBSERVE, Cache, Step, kernel
from oled.policies.part import Retention
from oled.policies.stage import PROMPT, hold, stage_of

TOKENS, STAGE = 0, 1


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    layer, stage = step.layer, stage_of(step)
    tokens, running = memory[TOKENS, layer], memory[STAGE, layer, 0]
    if stage != running:
        if running == 0.0:
            hold(layer, cache, cache.prior[layer])
        elif running > PROMPT:
            hold(layer, cache, tokens)
        for expert in range(cache.num_experts[layer]):
            tokens[expert] = 0.0
        memory[STAGE, layer, 0] = stage
    if stage > PROMPT:
        for i in range(step.expert.size):
            tokens[step.expert[i]] += step.count[i]


@dataclasses.dataclass(frozen=True, slots=True)
class LastStage(Retention):
    """Most used in the last stage; frozen until the next boundary."""

    needs = frozenset({"order", "stages", "calibration"})
    observe = observe

    def memory_shape(self, layers: int, experts: int) -> tuple[int, int, int]:
        return (2, layers, experts)
