"""Verify set: what a draft predicts is copied before its verification (DraftExpert).

Source: arXiv 2607.24434 (summaries): every drafted token that is kept launches the copies of its
predicted experts that are neither resident nor on their way; drafting goes on meanwhile; the
verification waits for what is in flight and loads the rest on demand. Read in the trace: what the
draft's routers chose in each layer, known at the last layer of a draft forward that is kept.
*Reconstruction*: layers in their order, in each the most wanted experts first, as many as the layer
has slots; a copy joins the residents as it lands; a predicted expert counts as used now, so that
neither copies nor the draft's own misses drive it out (this takes a retention by time of use, LRU);
what has not begun when a layer of the verification is routed is dropped. Cost: O(L E) a draft.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled._jit import inner_njit
from oled.policies.interface import ASK, FILL, NEVER, Cache, Queue, Side, Step, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import is_wanted, push

DRAFT = 4  # oled.trace.schema.Phase.DRAFT

# memory[0]: what belongs to no expert
LAST, NUMBER = 0, 1  # the last kept draft's forward, and how many verify sets there were


@inner_njit
def forget_layer(queue: Queue, layer: int) -> None:
    """Drop what is asked for in this layer and has not begun."""
    kept = queue.span[0]
    for j in range(queue.span[0], queue.span[1]):
        if queue.layer[j] != layer:
            queue.layer[kept], queue.expert[kept] = queue.layer[j], queue.expert[j]
            queue.kind[kept], queue.due[kept] = queue.kind[j], queue.due[j]
            queue.chunks[kept] = queue.chunks[j]
            kept += 1
    queue.span[1] = kept


@inner_njit
def ask_for_layer(
    step: Step,
    cache: Cache,
    side: Side,
    queue: Queue,
    memory: NDArray[np.float64],
    row: int,
    layer: int,
) -> None:
    """Mark the predicted experts of `layer` as parts of this verify set and ask for them."""
    number, members = memory[0, 0, NUMBER], 0
    for expert in range(cache.num_experts[layer]):
        members += int(memory[1 + layer, expert, 0] == number)
    for j in range(side.pred_offsets[row], side.pred_offsets[row + 1]):
        expert = int(side.pred_expert[j])
        if memory[1 + layer, expert, 0] != number:
            if members >= cache.capacity[layer]:
                return
            members += 1
            memory[1 + layer, expert, 0] = number
        cache.score[layer, expert] = step.clock
        if is_wanted(cache, layer, expert):
            push(queue, layer, expert, FILL, NEVER, 1)


@kernel(ASK)
def ask(step: Step, cache: Cache, costs, plan, side: Side, queue: Queue, memory, params) -> None:  # type: ignore[no-untyped-def]
    if step.phase != DRAFT:
        forget_layer(queue, step.layer)
        return
    layers = cache.num_experts.size
    first = step.index * side.horizons
    if step.layer + 1 < layers or side.horizons < layers:
        return
    if side.pred_offsets[first] == side.pred_offsets[first + layers]:
        return
    if memory[0, 0, NUMBER] == 0.0 or step.forward != memory[0, 0, LAST] + 1:
        memory[0, 0, NUMBER] += 1.0
    memory[0, 0, LAST] = step.forward
    for layer in range(layers):
        ask_for_layer(step, cache, side, queue, memory, first + layer, layer)


@dataclasses.dataclass(frozen=True, slots=True)
class VerifySet(Prefetch):
    """The experts that the drafts so far say their verification will need."""

    needs = frozenset({"order", "predictions", "drafts"})
    ask = ask

    def memory_shape(self, layers: int, experts: int) -> tuple[int, int, int]:
        return (1 + layers, experts, 2)
