"""Stride: predictions for the layer `stride` ahead, copied in chunks that give way (ProMoE).

Source: arXiv 2410.22134 (summaries). A small network per layer predicts the experts of a layer
about two layers ahead from the input of this one; copies are cut into chunks, a demand copy passes
between two chunks, experts already cached are computed first. Read in the trace: the recorded
predictions for that distance (of whatever predictor was recorded), most wanted first. The first
layers of a forward, which lie less than a stride from its start, get no prediction.
*Reconstruction*: number of chunks (gate, up and down make three) and of experts. Cost: O(width).
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import ASK, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.next_gate import push_predicted


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: NoMemory,
    params: Stride,
) -> None:
    push_predicted(step, cache, side, queue, params.stride, params.width, params.chunks)


@dataclasses.dataclass(frozen=True, slots=True)
class Stride(Prefetch):
    """The `width` most wanted experts (0: all named) `stride` layers on, in `chunks` pieces."""

    stride: int = 2
    width: int = 0
    chunks: int = 3

    needs = frozenset({"order", "predictions"})
    ask = ask

    def __post_init__(self) -> None:
        if self.stride < 1 or self.width < 0 or self.chunks < 1:
            raise ValueError(
                f"stride is {self.stride}, width {self.width} and chunks {self.chunks}; "
                "they must be at least 1, 0 and 1"
            )
