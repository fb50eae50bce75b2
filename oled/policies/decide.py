"""One layer-step's decision: classify residency, let the parts decide, settle who stays.

`decide` is used unchanged by the simulator and by the live executor. Nothing here knows a clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oled._jit import jitable, shared_njit
from oled.policies.admission import admit
from oled.policies.interface import (
    ABSENT,
    COPYING,
    IN_FLIGHT,
    LANDED,
    ON_CPU,
    ON_GPU,
    PREFILL,
    PREFILL_POLICY,
    PREFILL_STREAM,
    RESIDENT,
    STAGED,
    STAMP_STEP,
    TRANSFER,
    Admission,
    Cache,
    Costs,
    Plan,
    Rules,
    Step,
)
from oled.policies.one_by_one import remember, serve_one_by_one
from oled.policies.selection import sort_by_rank

DEMAND, SEQUENTIAL, FROZEN = (
    int(kind) for kind in (Admission.DEMAND, Admission.SEQUENTIAL, Admission.FROZEN)
)


@jitable
def decide(parts: Any, step: Step, cache: Cache, costs: Costs, plan: Plan, rules: Rules) -> int:
    """Decide one layer-step: fill `plan`, update scores and residency.

    `parts` are the functions, memory and params of a policy's parts (`oled.sim.parts.Parts`).
    Returns the slots that copies may take at once. In Python it runs as Python (its parts may be
    plain functions), in compiled code it is compiled.
    """
    memory, params = parts.memory, parts.params
    classify_residency(step, cache, plan)
    used, resident_bytes = int(cache.used[step.layer]), int(cache.resident_bytes)
    by_policy = decides(step, rules)
    if by_policy:
        parts.watch(step, cache, memory.allocation, params.allocation)
        if rules.admission == SEQUENTIAL:
            remember(step, cache)
    touch(step, cache)
    if by_policy or rules.prefill == PREFILL_STREAM:
        parts.observe(step, cache, memory.retention, params.retention)
    if by_policy and rules.admission != SEQUENTIAL:
        parts.dispatch(step, cache, costs, plan, memory.dispatch, params.dispatch)
    settle(step, cache, plan, rules)
    return int(slots_at_once(step, cache, plan, rules, used, resident_bytes))


@shared_njit
def decides(step: Step, rules: Rules) -> bool:
    """Whether the policy decides this layer-step: prefill may be streamed or bypassed instead."""
    return step.phase != PREFILL or rules.prefill == PREFILL_POLICY


@shared_njit
def slots_at_once(
    step: Step, cache: Cache, plan: Plan, rules: Rules, used: int, resident_bytes: int
) -> int:
    """Slots that copies for this layer may take at once: what was free before the step (`used`
    residents of this layer, `resident_bytes` in all) and what has been evicted since, except from
    active experts, which compute first.
    """
    if rules.overshoot:
        return 1 << 30
    if rules.pooled:
        free_bytes = cache.budget_bytes - resident_bytes
        for j in range(plan.evictions):
            free_bytes += cache.expert_bytes[plan.evicted[j] // cache.resident.shape[1]]
        room = free_bytes // cache.expert_bytes[step.layer]
    else:
        room = cache.capacity[step.layer] - used + plan.evictions
    return int(room - plan.evicted_active + rules.staging - cache.staged_experts)


@shared_njit
def settle(step: Step, cache: Cache, plan: Plan, rules: Rules) -> None:
    """Who stays, and in which order transfers go."""
    if decides(step, rules):
        if rules.admission == SEQUENTIAL:
            serve_one_by_one(step, cache, plan, rules.by_mention)
        elif rules.admission != FROZEN:
            demand = rules.admission == DEMAND
            admit(step, cache, plan, demand, rules.overshoot, rules.pooled)
    arrange(step, plan)


@shared_njit
def classify_residency(step: Step, cache: Cache, plan: Plan) -> None:
    """Fill `plan.state` before anything moves; misses are proposed as transfers in id order."""
    layer = step.layer
    for expert in range(plan.index.size):
        plan.index[expert] = -1
    for i in range(step.expert.size):
        expert = step.expert[i]
        plan.index[expert] = i
        state = ABSENT
        if cache.resident[layer, expert] != 0:
            state = RESIDENT
        elif cache.staged[layer, expert] >= STAGED:
            state = LANDED
        elif cache.staged[layer, expert] == COPYING:
            state = IN_FLIGHT
        plan.state[i] = state
        plan.place[i] = TRANSFER if state == ABSENT else ON_GPU
        plan.rank[i] = 0.0
        plan.stays[i] = 0
    plan.transfers = plan.evictions = plan.evicted_active = plan.on_cpu = plan.late = 0


@shared_njit
def touch(step: Step, cache: Cache) -> None:
    """Renew the recency stamps of the active set."""
    for i in range(step.expert.size):
        mention = np.int64(step.last_token[i])  # the sum does not fit 32 bits
        cache.stamp[step.layer, step.expert[i]] = step.clock * STAMP_STEP + mention


@jitable
def arrange(step: Step, plan: Plan) -> None:
    """Order the transfers and count: those that will not stay go first, then by (rank, id).

    The slot of an expert that does not stay is free again after its compute, so it serves the waves
    that follow.
    """
    n = 0
    for stays in range(2):
        first = n
        for i in range(step.expert.size):
            if plan.place[i] == TRANSFER and plan.stays[i] == stays:
                plan.order[n] = i
                n += 1
        sort_by_rank(plan.order, plan.rank, first, n)
    plan.transfers = n
    for i in range(step.expert.size):
        if plan.place[i] == ON_CPU:
            plan.on_cpu += 1
        elif plan.state[i] == IN_FLIGHT:
            plan.late += 1
