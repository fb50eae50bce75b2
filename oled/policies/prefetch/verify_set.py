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

from oled._jit import jitable
from oled.policies.interface import ASK, FILL, NEVER, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import is_wanted, push
from oled.policies.struct import Matrix, Mutable

DRAFT = 4  # oled.trace.schema.Phase.DRAFT


class Sets(Memory):
    """Which experts the drafts have named."""

    member: Matrix[np.float64]  # [L, E] number of the last verify set that the expert was in
    number: Mutable[float] = 0.0  # verify sets so far
    last: Mutable[float] = 0.0  # forward of the last kept draft


@jitable
def forget_layer(queue: Queue, layer: int) -> None:
    """Drop what is asked for in this layer and has not begun."""
    kept = queue.begin
    for j in range(queue.begin, queue.end):
        if queue.layer[j] != layer:
            queue.layer[kept], queue.expert[kept] = queue.layer[j], queue.expert[j]
            queue.kind[kept], queue.due[kept] = queue.kind[j], queue.due[j]
            queue.chunks[kept] = queue.chunks[j]
            kept += 1
    queue.end = kept


@jitable
def ask_for_layer(
    step: Step,
    cache: Cache,
    side: Side,
    queue: Queue,
    memory: Sets,
    row: int,
    layer: int,
) -> None:
    """Mark the predicted experts of `layer` as parts of this verify set and ask for them."""
    number, members = memory.number, 0
    for expert in range(cache.num_experts[layer]):
        members += int(memory.member[layer, expert] == number)
    for j in range(side.pred_offsets[row], side.pred_offsets[row + 1]):
        expert = int(side.pred_expert[j])
        if memory.member[layer, expert] != number:
            if members >= cache.capacity[layer]:
                return
            members += 1
            memory.member[layer, expert] = number
        cache.score[layer, expert] = step.clock
        if is_wanted(cache, layer, expert):
            push(queue, layer, expert, FILL, NEVER, 1)


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: Sets,
    params: VerifySet,
) -> None:
    if step.phase != DRAFT:
        forget_layer(queue, step.layer)
        return
    layers = cache.num_experts.size
    first = step.index * side.horizons
    if step.layer + 1 < layers or side.horizons < layers:
        return
    if side.pred_offsets[first] == side.pred_offsets[first + layers]:
        return
    if memory.number == 0.0 or step.forward != memory.last + 1:
        memory.number += 1.0
    memory.last = step.forward
    for layer in range(layers):
        ask_for_layer(step, cache, side, queue, memory, first + layer, layer)


@dataclasses.dataclass(frozen=True, slots=True)
class VerifySet(Prefetch):
    """The experts that the drafts so far say their verification will need."""

    needs = frozenset({"order", "predictions", "drafts"})
    ask = ask

    def memory(self, layers: int, experts: int) -> Sets:
        return Sets(member=np.zeros((layers, experts)))
