"""The clock: one layer-step on the lanes.

Order of events at one instant, tested: a copy lands, then the GPU ends a launch group, then the CPU
ends, then the layer, if all have ended; only then does new work begin, demand copies before
prefetches. So an expert that lands at the nanosecond at which the GPU falls idle belongs to the
next group, and one that lands as the routing becomes known has landed.

A decision takes the policy's time. What it decides begins when that time is over: its demand
copies, and behind them the prefetches asked for with them. Meanwhile the link goes on with
prefetches that an earlier layer-step asked for.

Slots: a copy on demand takes a free resident slot of its layer or a staging slot. Prefetches take
staging slots, all but one, and none begins while the layer has demand copies to begin.
"""

from __future__ import annotations

import numpy as np

from oled._jit import jitable, shared_njit
from oled.policies.interface import (
    COPYING,
    IN_FLIGHT,
    LANDED,
    ON_CPU,
    ON_GPU,
    Cache,
    Costs,
    Plan,
    Queue,
    Rules,
    Step,
)
from oled.sim.lanes import (
    COPY_STALL,
    CPU_STALL,
    D2H,
    DEMAND,
    GPU,
    IDLE,
    LOG_COPY,
    LOG_CPU,
    LOG_DENSE,
    LOG_HEAD,
    LOG_HITS,
    LOG_LANDED,
    LOG_OUT,
    LOG_POLICY,
    LOG_USE,
    MOVED,
    POLICY_STALL,
    PPM,
    Lanes,
    both_read,
    end_chunk,
    finish_time,
    group_ns,
    note,
    pass_time,
    put_on_link,
    take_prefetch,
)
from oled.sim.staging import settle_landed

NO_EVENT = 2**62


@shared_njit
def run_until(
    lanes: Lanes,
    until: int,
    forward: int,
    routed: int,
    busy_layer: int,
    cache: Cache,
    costs: Costs,
    queue: Queue,
    rules: Rules,
) -> int:
    """Let time pass to `until` while no experts execute; only prefetches move.

    `routed`: the last layer-step whose routing is known; `busy_layer`: its layer while it lasts.
    Nothing begins at `until` itself. Returns the slots that prefetches took, less those that
    became free.
    """
    taken = 0
    while lanes.now < until:
        if lanes.link_what == IDLE:
            room = rules.staging - 1 - cache.staged_experts
            taken += max(0, take_prefetch(lanes, queue, cache, costs, routed, room))
        if lanes.link_what == IDLE:
            pass_time(lanes, until, PPM, PPM)
            break
        end = finish_time(lanes.now, lanes.link_left, PPM)
        if end > until:
            pass_time(lanes, until, PPM, PPM)
            break
        pass_time(lanes, end, PPM, PPM)
        if end_chunk(lanes, cache, forward):
            taken -= settle_landed(lanes, routed, busy_layer, cache, rules)
    return taken


@jitable
def run_dense(
    lanes: Lanes, work_ns: int, step: Step, cache: Cache, costs: Costs, queue: Queue, rules: Rules
) -> None:
    """The dense part of a layer, at whose end its routing is known."""
    begin = lanes.now
    lanes.busy[GPU] += work_ns
    note(lanes, LOG_DENSE, begin, begin + work_ns, step.forward, step.layer, step.tokens)
    run_until(lanes, begin + work_ns, step.forward, step.index - 1, -1, cache, costs, queue, rules)


@jitable
def run_policy(
    lanes: Lanes, step: Step, cache: Cache, costs: Costs, queue: Queue, rules: Rules
) -> int:
    """Let the policy's own time pass; returns the slots that earlier prefetches took meanwhile."""
    if costs.policy_ns == 0:
        return 0
    now = lanes.now
    end = now + costs.policy_ns
    lanes.stall[POLICY_STALL] += costs.policy_ns
    note(lanes, LOG_POLICY, now, end, step.forward, step.layer, 0)
    at = step.index, step.layer
    return int(run_until(lanes, end, step.forward, *at, cache, costs, queue, rules))


@jitable
def run_head(
    lanes: Lanes,
    work_ns: int,
    forward: int,
    routed: int,
    cache: Cache,
    costs: Costs,
    queue: Queue,
    rules: Rules,
) -> None:
    """What follows the last layer of a forward."""
    end = lanes.now + work_ns
    lanes.busy[GPU] += work_ns
    note(lanes, LOG_HEAD, lanes.now, end, forward, -1, 0)
    run_until(lanes, end, forward, routed, -1, cache, costs, queue, rules)


@shared_njit
def run_layer(
    lanes: Lanes,
    step: Step,
    plan: Plan,
    cache: Cache,
    costs: Costs,
    queue: Queue,
    rules: Rules,
    free_slots: int,
) -> None:
    """Execute one layer-step from `lanes.now`, routing known and policy time charged.

    `free_slots`: slots that a copy may take at once; below zero where a large expert has joined the
    pool since the decision, and slots that become free make up for it first. An active resident
    that is evicted frees its slot when the hits have computed; a newcomer that does not stay, when
    its own group has.
    """
    layer, forward = step.layer, step.forward
    begin = lanes.now

    hits, hit_assignments, late, cpu_tokens, cpu_work = 0, 0, 0, 0, 0
    for i in range(step.expert.size):
        if plan.place[i] == ON_CPU:
            cpu_tokens += step.count[i]
            cpu_work += costs.cpu_ns[costs.layer_class[layer], step.count[i]]
        elif plan.place[i] == ON_GPU:
            if plan.state[i] == IN_FLIGHT and cache.staged[layer, step.expert[i]] == COPYING:
                late += 1
            else:
                hits += 1
                hit_assignments += step.count[i]
                if plan.state[i] == LANDED or plan.state[i] == IN_FLIGHT:
                    note(lanes, LOG_USE, begin, begin, forward, layer, np.int64(step.expert[i]))

    cpu_running = plan.on_cpu > 0
    back_ns = 0
    lanes.cpu_left = 0
    if cpu_running:
        cpu_tokens = min(cpu_tokens, step.tokens)
        out_ns, back_ns = costs.act_out_ns[cpu_tokens], costs.act_back_ns[cpu_tokens]
        lanes.cpu_begin = begin + out_ns
        lanes.cpu_left = (costs.cpu_call_ns + cpu_work) * PPM
        lanes.busy[D2H] += out_ns
        note(lanes, LOG_OUT, begin, begin + out_ns, forward, layer, cpu_tokens)

    released_by_group = plan.evicted_active
    lanes.gpu_until = begin
    if hits > 0:
        lanes.gpu_until = begin + group_ns(costs, layer, hit_assignments, hits)
        lanes.busy[GPU] += lanes.gpu_until - begin
        note(lanes, LOG_HITS, begin, lanes.gpu_until, forward, layer, hits)

    transfers = plan.transfers
    pending = transfers + late  # experts to compute that have not landed
    copied = 0  # demand copies begun
    ready, ready_assignments, ready_leaving = 0, 0, 0
    cpu_back = begin

    while True:
        computing = lanes.gpu_until > lanes.now
        if not computing:
            free_slots += released_by_group
            released_by_group = 0
            if ready > 0:
                lanes.gpu_until = lanes.now + group_ns(costs, layer, ready_assignments, ready)
                lanes.busy[GPU] += lanes.gpu_until - lanes.now
                note(lanes, LOG_LANDED, lanes.now, lanes.gpu_until, forward, layer, ready)
                released_by_group = ready_leaving
                ready, ready_assignments, ready_leaving = 0, 0, 0
                continue
            if pending == 0 and not cpu_running:
                break
        if lanes.link_what == IDLE:
            if copied < transfers:
                if free_slots > 0:
                    free_slots -= 1
                    work = costs.copy_ns[costs.layer_class[layer]]
                    put_on_link(lanes, DEMAND, work, costs.copy_wake_ns)
                    copied += 1
            else:
                room = min(rules.staging - 1 - cache.staged_experts, free_slots)
                free_slots -= max(0, take_prefetch(lanes, queue, cache, costs, step.index, room))

        both = both_read(lanes)
        link_rate = costs.link_contention_ppm if both else PPM
        cpu_rate = costs.cpu_contention_ppm if both else PPM
        if not computing and lanes.link_what == IDLE and not cpu_running:
            raise RuntimeError("a transfer waits for a slot that never becomes free")
        event = lanes.gpu_until if computing else NO_EVENT
        if lanes.link_what != IDLE:
            event = min(event, finish_time(lanes.now, lanes.link_left, link_rate))
        if cpu_running:
            if lanes.cpu_begin > lanes.now:
                event = min(event, lanes.cpu_begin)
            else:
                event = min(event, finish_time(lanes.now, lanes.cpu_left, cpu_rate))
        if not computing:
            stalled = COPY_STALL if pending > 0 else CPU_STALL
            lanes.stall[stalled] += event - lanes.now
        pass_time(lanes, event, link_rate, cpu_rate)

        if lanes.link_what != IDLE and lanes.link_left <= 0:
            if lanes.link_what == DEMAND:
                i = plan.order[copied - 1]
                note(
                    lanes,
                    LOG_COPY,
                    lanes.link_began,
                    lanes.now,
                    forward,
                    layer,
                    np.int64(step.expert[i]),
                )
                lanes.link_what, lanes.link_ended = IDLE, lanes.now
                lanes.moved[MOVED] += cache.expert_bytes[layer]
                pending -= 1
                ready += 1
                ready_assignments += step.count[i]
                ready_leaving += 1 - plan.stays[i]
            elif end_chunk(lanes, cache, forward):
                i = plan.index[lanes.copying.expert]
                mine = lanes.copying.layer == layer and i >= 0
                if mine and plan.state[i] == IN_FLIGHT and plan.place[i] == ON_GPU:
                    pending -= 1
                    ready += 1
                    ready_assignments += step.count[i]
                    note(
                        lanes,
                        LOG_USE,
                        lanes.now,
                        lanes.now,
                        forward,
                        layer,
                        np.int64(step.expert[i]),
                    )
                else:
                    free_slots += settle_landed(lanes, step.index, layer, cache, rules)
        if cpu_running and lanes.cpu_begin <= lanes.now and lanes.cpu_left <= 0:
            cpu_running = False
            cpu_back = lanes.now + back_ns
            note(lanes, LOG_CPU, lanes.cpu_begin, lanes.now, forward, layer, plan.on_cpu)
    lanes.cpu_left = 0
    if cpu_back > lanes.now:
        lanes.stall[CPU_STALL] += cpu_back - lanes.now
        run_until(lanes, cpu_back, forward, step.index, layer, cache, costs, queue, rules)
