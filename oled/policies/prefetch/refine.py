"""Refine: before a layer is accessed, its lowest residents give way to predicted experts.

Source: arXiv 2609.04895 and wuzhenhe/Spatio-Temporal-router. Read in code: a second head, on the
hidden state of the causal predecessor (the layer before; for the first layer the last one, a token
earlier), gives a spatial probability that is added to the priority; up to R of the lowest residents
are replaced, and every insert counts as a transfer (R 15 of 20 slots, or 6 of 8). The published
replay has no clock. *Reconstruction*: at a layer the priorities of the layer-step that comes next
are raised by what was predicted for it (mean over the tokens); of the highest, as many as there are
slots, the missing ones are queued, highest first, at most R; each becomes a resident as it lands,
in the place of the lowest, and what has not begun when the access comes is dropped. Cost: O(E), by
selection.
"""

from __future__ import annotations

import dataclasses

from oled._jit import jitable
from oled.policies.interface import ASK, FILL, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import clear, is_wanted, push
from oled.policies.selection import select_lowest, sort_lowest


@jitable
def raise_scores(step: Step, cache: Cache, side: Side, layer: int) -> None:
    """Add to the scores of `layer`, the next to come, what this layer-step predicts for it."""
    layers = cache.num_experts.size
    ahead = layer - step.layer if layer > step.layer else layer - step.layer + layers
    if ahead > side.horizons:
        return
    row = step.index * side.horizons + ahead - 1
    for j in range(side.pred_offsets[row], side.pred_offsets[row + 1]):
        cache.score[layer, side.pred_expert[j]] += side.pred_score[j] / step.tokens


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: NoMemory,
    params: Refine,
) -> None:
    clear(queue)
    due = step.index + 1
    if due >= side.layer.size:
        return
    if side.forward_request[side.forward[due]] != side.forward_request[step.forward]:
        return
    layer = side.layer[due]
    raise_scores(step, cache, side, layer)
    experts, places = cache.num_experts[layer], cache.capacity[layer]
    for expert in range(experts):
        cache.key[expert] = -cache.score[layer, expert]
        cache.age[expert] = -cache.stamp[layer, expert]
        cache.item[expert] = expert
    places = min(places, experts)
    select_lowest(cache.key, cache.age, cache.item, experts, places)
    sort_lowest(cache.key, cache.age, cache.item, places)
    left = int(params.share * cache.capacity[layer])
    for j in range(places):
        if left > 0 and is_wanted(cache, layer, cache.item[j]):
            push(queue, layer, cache.item[j], FILL, due, 1)
            left -= 1


@dataclasses.dataclass(frozen=True, slots=True)
class Refine(Prefetch):
    """Replaces at most this `share` of a layer's slots before each access; 0.75 as published."""

    share: float = 0.75

    needs = frozenset({"order", "predictions"})
    ask = ask

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share is {self.share}; it must lie in (0, 1]")
