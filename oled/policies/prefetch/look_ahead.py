"""Look-ahead: predicted experts of as many layers as the predictor is sure of (SPICE).

Source: arXiv 2608.21240 (abstract, summaries of two versions). Cross-layer drafts say which experts
the next layers will route to; each layer starts from its true hidden state again. How far ahead
copies are asked for is bounded from below by what the link needs, in a roofline of copy and compute
time, goes on while the predicted mass of a token's k experts is at least `confidence`, and ends
after `horizon` layers (6 to 8). The queue is written anew at each layer, the nearest layer first.
*Reconstruction*: the lower bound is the copy of one expert over this layer's expert computation, so
many layers (its dense part would shorten it); the mass is the mean over the forward's tokens.
Cost: O(horizon x width).
"""

from __future__ import annotations

import dataclasses

from oled._jit import jitable
from oled.policies.interface import ASK, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.next_gate import push_predicted
from oled.policies.prefetch.queue import clear


@jitable
def layers_to_copy(step: Step, costs: Costs) -> int:
    """Layers like this one that compute while one expert is copied, rounded up."""
    row, pairs = costs.layer_class[step.layer], 0
    for i in range(step.expert.size):
        pairs += step.count[i]
    tokens = (pairs + costs.top_k - 1) // costs.top_k
    computes = max(1, costs.gpu_ns[row, tokens, step.expert.size])
    return int((costs.copy_ns[row] + computes - 1) // computes)


@jitable
def predicted_mass(step: Step, side: Side, ahead: int) -> float:
    """Mean over the tokens of what was predicted for the layer `ahead`; 0 where nothing was."""
    if ahead > side.horizons:
        return 0.0
    row, mass = step.index * side.horizons + ahead - 1, 0.0
    for j in range(side.pred_offsets[row], side.pred_offsets[row + 1]):
        mass += float(side.pred_score[j])  # single precision does not add up the same uncompiled
    return mass / step.tokens


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: NoMemory,
    params: LookAhead,
) -> None:
    clear(queue)
    least = layers_to_copy(step, costs)
    for ahead in range(1, params.horizon + 1):
        if ahead > least and predicted_mass(step, side, ahead) < params.confidence:
            break
        push_predicted(step, cache, side, queue, ahead, 0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class LookAhead(Prefetch):
    """Layers while the predicted mass is at least `confidence`, at most `horizon` of them."""

    confidence: float = 0.7
    horizon: int = 8

    needs = frozenset({"order", "predictions"})
    ask = ask

    def __post_init__(self) -> None:
        if not 0.0 <= self.confidence <= 1.0 or self.horizon < 1:
            raise ValueError(
                f"confidence is {self.confidence} and horizon {self.horizon}; "
                "they must lie in [0, 1] and be at least 1"
            )
