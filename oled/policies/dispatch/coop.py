"""OLED Coop: a hardware-aware split of the misses, then a few swaps for what will be used again.

Source: arXiv 2609.33385; the formulas are not public, so all of this is a *reconstruction*. The
misses are ordered by load (tokens). The first n are copied, the others run on the CPU; n is the
number that minimises

    makespan = max(n * copy time, call + CPU time of the others)

on the profiled machine, the smaller n of equal ones. Then at most `swaps` times the transferred
expert least likely to be used again and the CPU's most likely one change sides, if that lowers

    makespan - mu * copy time * (sum of the predicted reuse of the transferred experts).

Predicted reuse is the retention's score, scaled so that the misses of the step span 0 to 1 (0 for
all where they are equal). Without reuse the split is the best of all; with it, its objective is
within mu best makespans of the best one (mu up to 1). Half a copy (`mu` 0.5) is what a resident
saves where copies and CPU are balanced: each takes about half of the misses.
Cost: O(A log A) for the order, O(A) a swap.
"""

from __future__ import annotations

import dataclasses

from oled.policies.dispatch.misses import by_tokens, predict_reuse, split
from oled.policies.interface import DISPATCH, Cache, Costs, Plan, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Dispatch


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: Coop
) -> None:
    swaps, mu = params.swaps, params.mu
    misses = by_tokens(step, cache, plan)
    if misses == 0:
        return
    row = costs.layer_class[step.layer]
    copy_ns, cpu_ns = costs.copy_ns[row], costs.cpu_ns[row]
    key, item, count = cache.key, cache.item, step.count

    on_cpu = costs.cpu_call_ns
    for j in range(misses):
        on_cpu += cpu_ns[count[item[j]]]
    transfers, makespan = 0, on_cpu
    for n in range(1, misses + 1):
        on_cpu -= cpu_ns[count[item[n - 1]]]
        longer = max(n * copy_ns, on_cpu if n < misses else 0)
        if longer < makespan:
            transfers, makespan = n, longer
    on_cpu = costs.cpu_call_ns
    for j in range(transfers, misses):
        on_cpu += cpu_ns[count[item[j]]]

    if transfers < misses:
        predict_reuse(step, cache, misses)
        for _ in range(swaps if transfers > 0 else 0):
            leaves, enters = 0, transfers
            for j in range(transfers):
                leaves = j if key[j] <= key[leaves] else leaves
            for j in range(transfers, misses):
                enters = j if key[j] > key[enters] else enters
            then = on_cpu + cpu_ns[count[item[leaves]]] - cpu_ns[count[item[enters]]]
            slower = max(transfers * copy_ns, then) - max(transfers * copy_ns, on_cpu)
            if slower >= mu * copy_ns * (key[enters] - key[leaves]):
                break
            on_cpu = then
            item[leaves], item[enters] = item[enters], item[leaves]
            key[leaves], key[enters] = key[enters], key[leaves]
    split(cache, plan, misses, transfers)


@dataclasses.dataclass(frozen=True, slots=True)
class Coop(Dispatch):
    """Load first, then at most `swaps` exchanges for predicted reuse, worth `mu` copies each."""

    swaps: int = 4
    mu: float = 0.5

    dispatch = dispatch

    def __post_init__(self) -> None:
        if self.swaps < 0 or self.mu < 0.0:
            raise ValueError(f"swaps is {self.swaps} and mu {self.mu}; both must be at least 0")
