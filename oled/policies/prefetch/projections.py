"""Projections: what the second half of an expert layer needs is known with the first.

Source: PCoMoE (arXiv 2609.01024, abstract) runs paths from expansions to projections; how it moves
them is not public. *Reconstruction*: as a token's path is known as soon as its router has spoken,
the missing projections are asked for while the expansions are copied and computed, most gate weight
first; they wait in staging and are never wrong. Needs a trace of halves. Cost: O(A) at every second
layer-step.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import ASK, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.next_gate import push_predicted
from oled.policies.prefetch.queue import clear


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: NoMemory,
    params: Projections,
) -> None:
    clear(queue)
    push_predicted(step, cache, side, queue, 1, 0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Projections(Prefetch):
    """The projections of this layer-step's paths that are not on the GPU."""

    needs = frozenset({"order", "predictions", "halves"})
    ask = ask
