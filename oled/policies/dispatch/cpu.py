"""All-CPU: every miss is computed where its weights are."""

from __future__ import annotations

import dataclasses

from oled.policies.interface import ABSENT, DISPATCH, ON_CPU, Cache, Costs, Plan, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Dispatch


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: AllCpu
) -> None:
    for i in range(step.expert.size):
        if plan.state[i] == ABSENT:
            plan.place[i] = ON_CPU


@dataclasses.dataclass(frozen=True, slots=True)
class AllCpu(Dispatch):
    """Every miss runs on the CPU; residents stay as they were placed."""

    transfers = False
    reads_costs = False
    dispatch = dispatch
