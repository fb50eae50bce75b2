"""Cheapest: each miss goes where it costs less, whatever the others do (Fiddler).

Source: arXiv 2402.07033 and efeslab/fiddler, `src/fiddler/mixtral.py`. Read in code: the cost of a
miss is 7 per token on the CPU and 70 on the GPU, in units of its own, so 10 tokens break even; the
comment there speaks of a maximum over the devices, but all subsets are enumerated for the least
*sum*, which is a minimum for each expert on its own. A transferred expert is not kept. By default
the two costs are those of this machine: on the CPU the expert and its activations both ways, on the
GPU the copy on an idle link and the expert alone. Reconstruction: ties go to the CPU. Cost: O(A).
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import ABSENT, DISPATCH, ON_CPU, TRANSFER, Cache, Costs, Plan, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Dispatch


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: Cheapest
) -> None:
    per_token, copy = params.cpu_per_token, params.copy
    row = costs.layer_class[step.layer]
    for i in range(step.expert.size):
        if plan.state[i] != ABSENT:
            continue
        count = step.count[i]
        if copy > 0.0:
            on_cpu, on_gpu = per_token * count, copy
        else:
            tokens = (count + costs.top_k - 1) // costs.top_k
            on_cpu = 1.0 * (costs.act_out_ns[count] + costs.cpu_ns[row, count])
            on_cpu += costs.act_back_ns[count]
            on_gpu = 1.0 * (costs.copy_ns[row] + costs.copy_wake_ns + costs.gpu_ns[row, tokens, 1])
        plan.place[i] = ON_CPU if on_cpu <= on_gpu else TRANSFER


@dataclasses.dataclass(frozen=True, slots=True)
class Cheapest(Dispatch):
    """An independent choice for every miss.

    cpu_per_token, copy: fixed costs in any unit; both 0: those of the machine.
    """

    cpu_per_token: float = 0.0
    copy: float = 0.0

    dispatch = dispatch

    def __post_init__(self) -> None:
        if self.cpu_per_token < 0 or self.copy < 0 or (self.cpu_per_token > 0) != (self.copy > 0):
            raise ValueError(
                f"cpu_per_token is {self.cpu_per_token} and copy {self.copy}; "
                "both must be positive, or both 0 for the machine's costs"
            )
