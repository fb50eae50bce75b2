"""Exact (ours): the best number of copies, and with it the best choice of what to copy.

Minimises, over all ways to split the misses between link and CPU,

    max(max(hits on the GPU, copies) + one landed expert on the GPU,
        activations out + call + experts on the CPU + activations back)

in which copies and CPU slow each other down while both run, by the profile's contention. It is
exact for this objective: all copies of a layer cost the same, and nothing but the CPU's sum depends
on *which* experts are copied, so for every number of copies the CPU keeps its cheapest experts.
Against the clock it leaves out: a landed expert's GPU time beyond its weights (one token is
charged; true for up to about a hundred tokens an expert), groups of several landed experts, slots
that are not free yet, and prefetches on the link; activations are those of all the forward's
tokens. Experts equally long on the CPU go by score, so that what is copied is what will be used
again; equal objectives to the smaller number of copies. Cost: O(A log A).
"""

from __future__ import annotations

import dataclasses

from oled._jit import jitable
from oled.policies.dispatch.misses import predict_reuse, split
from oled.policies.interface import ABSENT, DISPATCH, Cache, Costs, Plan, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Dispatch
from oled.policies.selection import sort_lowest

PPM = 1_000_000


@jitable
def _stretched(work_ns: int, ppm: int) -> int:
    """How long `work_ns` takes at so many millionths of its speed."""
    return (work_ns * PPM + ppm - 1) // ppm


@jitable
def objective(
    hits_ns: int, link_ns: int, out_ns: int, work_ns: int, back_ns: int, tail_ns: int, costs: Costs
) -> int:
    """The makespan in nanoseconds; `work_ns` 0 for no CPU, `link_ns` 0 for no copies."""
    both = 0  # how long both read memory: until the first of them is done
    if work_ns > 0 and link_ns > out_ns:
        copy_left = link_ns - out_ns
        both = min(
            _stretched(copy_left, costs.link_contention_ppm),
            _stretched(work_ns, costs.cpu_contention_ppm),
        )
    on_gpu, on_cpu = hits_ns, 0
    if link_ns > 0:
        lost = both - min(both * costs.link_contention_ppm // PPM, link_ns)
        on_gpu = max(hits_ns, link_ns + lost) + tail_ns
    if work_ns > 0:
        lost = both - min(both * costs.cpu_contention_ppm // PPM, work_ns)
        on_cpu = out_ns + work_ns + lost + back_ns
    return max(on_gpu, on_cpu)


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: Exact
) -> None:
    row = costs.layer_class[step.layer]
    misses, hits, assignments, work = 0, 0, 0, costs.cpu_call_ns
    for i in range(step.expert.size):
        if plan.state[i] == ABSENT:
            cache.item[misses] = i
            misses += 1
            work += costs.cpu_ns[row, step.count[i]]
        else:
            hits += 1
            assignments += step.count[i]
    if misses == 0:
        return
    hits_ns = costs.gpu_ns[row, (assignments + costs.top_k - 1) // costs.top_k, hits]
    tail_ns = costs.gpu_ns[row, 1, 1]
    out_ns, back_ns = costs.act_out_ns[step.tokens], costs.act_back_ns[step.tokens]

    predict_reuse(step, cache, misses)
    for j in range(misses):  # whole nanoseconds, then the score
        i = cache.item[j]
        cache.key[j] = -costs.cpu_ns[row, step.count[i]] - 0.5 * cache.key[j]
        cache.age[j] = i
    sort_lowest(cache.key, cache.age, cache.item, misses)

    transfers = 0
    best = objective(hits_ns, 0, out_ns, work, back_ns, tail_ns, costs)
    for n in range(1, misses + 1):
        work -= costs.cpu_ns[row, step.count[cache.item[n - 1]]]
        if n == misses:
            work = 0
        link = costs.copy_wake_ns + n * costs.copy_ns[row]
        value = objective(hits_ns, link, out_ns, work, back_ns, tail_ns, costs)
        if value < best:
            transfers, best = n, value
    split(cache, plan, misses, transfers)


@dataclasses.dataclass(frozen=True, slots=True)
class Exact(Dispatch):
    """The split with the least makespan, for copies of one cost."""

    dispatch = dispatch
