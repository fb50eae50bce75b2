"""Next gate: what the routers of the next layers say about this layer's input is copied ahead.

Source: the report of Mixtral-offloading (arXiv 2312.17238; not in its repository), AdapMoE
(2408.10284), Fate (2502.12224), HybriMoE (2504.05897, three layers) and DALI (2602.03495, with a
residual correction) in their common form. Read in the trace: the recorded predictions, most wanted
experts first. They name the top-k of every token, so for one token k experts, as in those systems.
At each layer the queue is written anew, the nearest layer first, so that a later and better
prediction replaces an earlier one; a copy begun goes on. *Reconstruction*: HybriMoE orders by
simulated gain, DALI by corrected load; here the order is the recorded predictor's.
Cost: O(horizon x width).
"""

from __future__ import annotations

import dataclasses

from oled._jit import jitable
from oled.policies.interface import ASK, HOLD, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import clear, is_wanted, push, step_ahead


@jitable
def push_predicted(
    step: Step, cache: Cache, side: Side, queue: Queue, ahead: int, width: int, chunks: int
) -> None:
    """Ask for what is predicted for the layer `ahead` of this one and is not on the GPU."""
    layer = step.layer + ahead
    due = step_ahead(side, step, layer)
    if due < 0 or ahead > side.horizons:
        return
    row = step.index * side.horizons + ahead - 1
    first, last = side.pred_offsets[row], side.pred_offsets[row + 1]
    if width > 0:
        last = min(last, first + width)
    for j in range(first, last):
        expert = int(side.pred_expert[j])
        if is_wanted(cache, layer, expert):
            push(queue, layer, expert, HOLD, due, chunks)


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: NoMemory,
    params: NextGate,
) -> None:
    clear(queue)
    for ahead in range(1, params.horizon + 1):
        push_predicted(step, cache, side, queue, ahead, params.width, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class NextGate(Prefetch):
    """The `width` most wanted experts (0: all named) of each of the next `horizon` layers."""

    horizon: int = 1
    width: int = 0

    needs = frozenset({"order", "predictions"})
    ask = ask

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.width < 0:
            raise ValueError(
                f"horizon is {self.horizon} and width {self.width}; they must be at least 1 and 0"
            )
