"""The clock of a blocking runtime: nothing overlaps."""

from __future__ import annotations

import numpy as np

from oled._jit import jitable, shared_njit
from oled.policies.interface import (
    ON_CPU,
    ON_GPU,
    Cache,
    Costs,
    Plan,
    Step,
)
from oled.sim.lanes import (
    COPY_STALL,
    CPU,
    CPU_STALL,
    D2H,
    GPU,
    H2D,
    LOG_BACK,
    LOG_COPY,
    LOG_CPU,
    LOG_HITS,
    LOG_LANDED,
    LOG_OUT,
    MOVED,
    Lanes,
    group_ns,
    note,
)


@shared_njit
def run_layer_serially(
    lanes: Lanes,
    step: Step,
    plan: Plan,
    cache: Cache,
    costs: Costs,
    free_slots: int,
    writes_back: bool,
) -> None:
    """One layer-step of a blocking runtime: nothing overlaps.

    Evicted experts are copied to the host first (`writes_back`), then as many to the device as
    there are slots; the GPU computes hits and newcomers as one group; what is left follows in
    waves; the CPU's experts come last. Each copy is waited for, so each pays the isolated latency.
    """
    layer, forward = step.layer, step.forward
    if writes_back:
        for j in range(plan.evictions):
            _write_back(lanes, plan.evicted[j], forward, cache, costs)
    copy_ns = costs.copy_ns[costs.layer_class[layer]] + costs.copy_wake_ns
    experts, assignments = 0, 0
    for i in range(step.expert.size):
        if plan.place[i] == ON_GPU:
            experts += 1
            assignments += step.count[i]
    copied, released = 0, plan.evicted_active
    while True:
        kind = LOG_HITS if copied == 0 else LOG_LANDED
        while copied < plan.transfers and free_slots > 0:
            i = plan.order[copied]
            note(
                lanes,
                LOG_COPY,
                lanes.now,
                lanes.now + copy_ns,
                forward,
                layer,
                np.int64(step.expert[i]),
            )
            lanes.now += copy_ns
            lanes.link_ended = lanes.now
            lanes.busy[H2D] += copy_ns
            lanes.stall[COPY_STALL] += copy_ns
            lanes.moved[MOVED] += cache.expert_bytes[layer]
            free_slots -= 1
            copied += 1
            experts += 1
            assignments += step.count[i]
            released += 1 - plan.stays[i]
        if experts > 0:
            gpu_ns = group_ns(costs, layer, assignments, experts)
            note(lanes, kind, lanes.now, lanes.now + gpu_ns, forward, layer, experts)
            lanes.busy[GPU] += gpu_ns
            lanes.now += gpu_ns
        if copied == plan.transfers:
            break
        if released == 0:
            raise RuntimeError("a transfer waits for a slot that never becomes free")
        free_slots += released
        released, experts, assignments = 0, 0, 0
    if plan.on_cpu > 0:
        _compute_on_cpu(lanes, step, plan, costs)


@jitable
def _write_back(lanes: Lanes, evicted: int, forward: int, cache: Cache, costs: Costs) -> None:
    """Copy one evicted expert to the host while everything waits."""
    layer, expert = evicted // cache.resident.shape[1], evicted % cache.resident.shape[1]
    out_ns = costs.copy_out_ns[costs.layer_class[layer]]
    note(lanes, LOG_BACK, lanes.now, lanes.now + out_ns, forward, layer, expert)
    lanes.busy[D2H] += out_ns
    lanes.stall[COPY_STALL] += out_ns
    lanes.now += out_ns


@jitable
def _compute_on_cpu(lanes: Lanes, step: Step, plan: Plan, costs: Costs) -> None:
    """The CPU's experts while everything waits: activations out, experts, results back."""
    tokens, work = 0, costs.cpu_call_ns
    for i in range(step.expert.size):
        if plan.place[i] == ON_CPU:
            tokens += step.count[i]
            work += costs.cpu_ns[costs.layer_class[step.layer], step.count[i]]
    tokens = min(tokens, step.tokens)
    begin = lanes.now + costs.act_out_ns[tokens]
    end = begin + work
    note(lanes, LOG_OUT, lanes.now, begin, step.forward, step.layer, tokens)
    note(lanes, LOG_CPU, begin, end, step.forward, step.layer, plan.on_cpu)
    lanes.busy[D2H] += begin - lanes.now
    lanes.busy[CPU] += work
    end += costs.act_back_ns[tokens]
    lanes.stall[CPU_STALL] += end - lanes.now
    lanes.now = end
