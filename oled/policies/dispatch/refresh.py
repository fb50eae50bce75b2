"""Periodic refresh: copies every `interval` denoising steps, else misses run on the CPU (TIDE).

Source: arXiv 2605.20179 and ims-kdks/TIDE, `model/modeling_llada2_moe.py`. Read in code: a step is
a refresh if its number in the block is a multiple of tau, and in the whole first generated block;
then, before computing, the experts with most tokens in *this* step, as many as the layer has slots,
are the target, and those of them that are missing are copied. Whatever else misses runs on the CPU.
Which surplus residents leave is arbitrary there; here the retention says so, and should rank by the
step's tokens. *Reconstruction*: equal tokens go to the expert mentioned last, as in the retention's
ties; a separate prefill counts as part of the first block (the released code forwards the prompt
with every step); the commit of a later block is no refresh. Cost: O(A), by selection.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import ABSENT, DISPATCH, ON_CPU, TRANSFER, Cache, Costs, Plan, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Dispatch
from oled.policies.selection import select_lowest
from oled.policies.struct import Mutable


class Opening(Memory):
    """The block that a request begins with."""

    block: Mutable[float] = 0.0  # its number + 1; 0: not known yet


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: Opening, params: PeriodicRefresh
) -> None:
    if step.block >= 0 and memory.block == 0.0:
        memory.block = step.block + 1
    opening = memory.block == 0.0 or memory.block == step.block + 1
    due = step.denoising_step >= 0 and step.denoising_step % params.interval == 0
    active = step.expert.size
    for i in range(active):
        if plan.state[i] == ABSENT:
            plan.place[i] = ON_CPU
        cache.key[i], cache.age[i] = -step.count[i], -cache.stamp[step.layer, step.expert[i]]
        cache.item[i] = i
    if not (opening or due):
        return
    target = min(cache.capacity[step.layer], active)
    select_lowest(cache.key, cache.age, cache.item, active, target)
    for j in range(target):
        if plan.state[cache.item[j]] == ABSENT:
            plan.place[cache.item[j]] = TRANSFER


@dataclasses.dataclass(frozen=True, slots=True)
class PeriodicRefresh(Dispatch):
    """The busiest experts are fetched every `interval` denoising steps."""

    interval: int = 4

    needs = frozenset({"order", "blocks"})
    reads_costs = False
    dispatch = dispatch

    def memory(self, layers: int, experts: int) -> Opening:
        return Opening()

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval is {self.interval}; it must be at least 1 step")
