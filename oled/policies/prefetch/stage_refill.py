"""Stage refill: at a stage's boundary the experts that the cache is reset to are copied (SAEM).

Source: arXiv 2608.21614 resets the cache at a boundary; how the copies are made is not public.
*Reconstruction*: at a layer's first step of a stage, the experts that its retention rates highest,
as many as it has slots, and that are not on the GPU are queued, highest score first. They are
copied while the link has nothing on demand and become residents as they land, so that the reset is
paid for on the link. What is still queued when the next stage begins is dropped. Cost: O(E) at a
boundary, by selection.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.policies.interface import ASK, FILL, NEVER, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import clear, is_wanted, push
from oled.policies.selection import select_lowest, sort_lowest
from oled.policies.stage import stage_of
from oled.policies.struct import Mutable, Vector


class Asked(Memory):
    """The stages that were asked for last."""

    stage: Vector[np.float64]  # [L] by each layer
    newest: Mutable[float] = 0.0  # by any layer


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: Asked,
    params: StageRefill,
) -> None:
    layer, stage = step.layer, stage_of(step)
    if memory.stage[layer] == stage:
        return
    memory.stage[layer] = stage
    if memory.newest != stage:
        memory.newest = stage
        clear(queue)
    experts = cache.num_experts[layer]
    for expert in range(experts):
        cache.key[expert] = -cache.score[layer, expert]
        cache.age[expert] = -cache.stamp[layer, expert]
        cache.item[expert] = expert
    places = min(cache.capacity[layer], experts)
    select_lowest(cache.key, cache.age, cache.item, experts, places)
    sort_lowest(cache.key, cache.age, cache.item, places)
    for j in range(places):
        if is_wanted(cache, layer, cache.item[j]):
            push(queue, layer, cache.item[j], FILL, NEVER, params.chunks)


@dataclasses.dataclass(frozen=True, slots=True)
class StageRefill(Prefetch):
    """The best-rated missing experts of a layer, asked for once a stage, in `chunks` pieces
    each."""

    chunks: int = 1

    needs = frozenset({"order", "stages"})
    ask = ask

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks}; it must be at least 1")

    def memory(self, layers: int, experts: int) -> Asked:
        return Asked(stage=np.zeros(layers))
