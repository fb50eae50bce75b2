"""Two-ended greedy: the GPU takes experts from a list's head, the CPU from its tail (HybriMoE).

Source: arXiv 2504.05897 and PKU-SEC-Lab/HybriMoE, `ktransformers/operators/experts.py`. Read in
code: the list is the residents by tokens, most first, then the misses by tokens, most first. Again
and again the finish time of the GPU with the head (a miss starts when all copies up to its own are
done) is compared with that of the CPU with the tail; the earlier one gets its expert. When the
misses run out, the CPU takes lightly loaded *residents*. Constants in the code, flagged there as
still to be measured: GPU 0.5 an expert, CPU a per token (1.0, 0.8 or 0.2 by model) and 0.79 more
for the first expert, copy 0.418. By default the times are those of this machine, where an expert on
the GPU costs its share of the step's one launch group, and the first on the CPU the call and the
activations. Reconstruction: ties go to the GPU; equal tokens go by id; what was fetched ahead and
has landed counts as resident, what is still on the link stays with the GPU. Cost: O(A log A).
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
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: TwoEnded
) -> None:
    gpu, per_token = params.gpu, params.cpu_per_token
    first, copy = params.cpu_first, params.copy
    row = costs.layer_class[step.layer]
    n, active = 0, step.expert.size
    for i in range(active):
        if plan.state[i] != IN_FLIGHT:
            behind = step.tokens + 1 if plan.state[i] == ABSENT else 0  # misses follow residents
            cache.key[n], cache.age[n], cache.item[n] = behind - step.count[i], i, i
            n += 1
    sort_lowest(cache.key, cache.age, cache.item, n)

    by_machine = copy == 0.0
    if by_machine:
        gpu = costs.gpu_ns[row, step.tokens, active] / active
        first = costs.cpu_call_ns + costs.act_out_ns[step.tokens] + costs.act_back_ns[step.tokens]
        copy = costs.copy_ns[row]
    gpu_until, cpu_until, link_until = 0.0, first, 0.0
    head, tail = 0, n - 1
    while head <= tail:
        i, j = cache.item[head], cache.item[tail]
        start = gpu_until
        if plan.state[i] == ABSENT:
            start = max(start, link_until + copy)
        count = step.count[j]
        on_cpu = cpu_until + (costs.cpu_ns[row, count] if by_machine else per_token * count)
        if start + gpu <= on_cpu:
            plan.place[i] = ON_GPU
            if plan.state[i] == ABSENT:
                plan.place[i], plan.rank[i] = TRANSFER, head
                link_until += copy
            gpu_until = start + gpu
            head += 1
        else:
            plan.place[j] = ON_CPU
            cpu_until = on_cpu
            tail -= 1


@dataclasses.dataclass(frozen=True, slots=True)
class TwoEnded(Dispatch):
    """Residents and misses from two ends.

    gpu, cpu_per_token, cpu_first, copy: fixed costs in any unit; all 0: those of the machine.
    """

    gpu: float = 0.0
    cpu_per_token: float = 0.0
    cpu_first: float = 0.0
    copy: float = 0.0

    dispatch = dispatch

    def __post_init__(self) -> None:
        given = [self.gpu > 0, self.cpu_per_token > 0, self.copy > 0]
        costs = (self.gpu, self.cpu_per_token, self.cpu_first, self.copy)
        if min(costs) < 0 or (any(costs) and not all(given)):
            raise ValueError(
                f"gpu, cpu_per_token, cpu_first and copy are {costs}; "
                "all must be positive (cpu_first may be 0), or all 0 for the machine's costs"
            )
