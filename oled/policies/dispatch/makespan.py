"""Makespan greedy: the experts with most at stake choose their side first (DALI).

Source: arXiv 2602.03495 (summaries; no code was found). Every active expert, resident or not, is
given to GPU or CPU to minimise max(T_CPU, T_GPU), where the GPU time of a missing expert includes
its copy; the greedy rule sorts by the difference of the two times and reaches 92 % of the optimum
in the paper. *Reconstruction*: the difference is absolute, largest first; an expert goes to the
side whose sum is smaller with it, ties to the GPU; the CPU's sum begins with the call and the
activations; a resident's GPU time is its share of the step's one launch group. What was fetched
ahead and has landed counts as resident, what is still on the link stays with the GPU. Transfers go
in the order of the choices. Cost: O(A log A).
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import (
    ABSENT,
    DISPATCH,
    IN_FLIGHT,
    ON_CPU,
    ON_GPU,
    TRANSFER,
    Cache,
    Costs,
    Plan,
    Step,
)
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Dispatch
from oled.policies.selection import sort_lowest


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: MakespanGreedy
) -> None:
    row = costs.layer_class[step.layer]
    n, active = 0, step.expert.size
    share = costs.gpu_ns[row, step.tokens, active] // max(1, active)
    copy = costs.copy_ns[row]
    for i in range(active):
        if plan.state[i] != IN_FLIGHT:
            on_gpu = share + (copy if plan.state[i] == ABSENT else 0)
            stake = abs(costs.cpu_ns[row, step.count[i]] - on_gpu)
            cache.key[n], cache.age[n], cache.item[n] = -stake, i, i
            n += 1
    sort_lowest(cache.key, cache.age, cache.item, n)

    gpu_sum = 0
    cpu_sum = costs.cpu_call_ns + costs.act_out_ns[step.tokens] + costs.act_back_ns[step.tokens]
    for j in range(n):
        i = cache.item[j]
        missing = plan.state[i] == ABSENT
        on_gpu = gpu_sum + share + (copy if missing else 0)
        on_cpu = cpu_sum + costs.cpu_ns[row, step.count[i]]
        plan.rank[i] = j
        if on_gpu <= on_cpu:
            plan.place[i] = TRANSFER if missing else ON_GPU
            gpu_sum = on_gpu
        else:
            plan.place[i] = ON_CPU
            cpu_sum = on_cpu


@dataclasses.dataclass(frozen=True, slots=True)
class MakespanGreedy(Dispatch):
    """Largest difference of the two times first."""

    dispatch = dispatch
