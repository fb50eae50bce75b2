"""One layer-step's decision: judge residency, let the parts decide, settle who stays.

`decide` is used unchanged by the simulator and by the live executor. Nothing here knows a clock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from oled._jit import bare_njit, inner_njit
from oled.policies.admission import admit
from oled.policies.interface import (
    ABSENT,
    COPYING,
    IN_FLIGHT,
    LANDED,
    N_CPU,
    N_EVICTED,
    N_EVICTED_ACTIVE,
    N_LATE,
    N_TRANSFERS,
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


@register_jitable(_nrt=False, error_model="numpy", forceinline=True)  # type: ignore[untyped-decorator]
def decide(
    observe: Callable[..., None],
    watch: Callable[..., None],
    dispatch: Callable[..., None],
    params: tuple[NDArray[np.float64], ...],
    memory: tuple[NDArray[np.float64], ...],
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    rules: Rules,
) -> int:
    """Decide one layer-step: fills `plan`, updates scores and residency.

    `params` and `memory` are those of retention, allocation, dispatch and prefetch, in this order.
    Returns the slots that copies may take at once. In Python it runs as Python (its parts may be
    plain functions), in compiled code it is compiled.
    """
    judge(step, cache, plan)
    used, resident_bytes = int(cache.used[step.layer]), int(cache.total[0])
    by_policy = decides(step, rules)
    if by_policy:
        watch(step, cache, memory[1], params[1])
        if rules.admission == SEQUENTIAL:
            remember(step, cache)
    touch(step, cache)
    if by_policy or rules.prefill == PREFILL_STREAM:
        observe(step, cache, memory[0], params[0])
    if by_policy and rules.admission != SEQUENTIAL:
        dispatch(step, cache, costs, plan, memory[2], params[2])
    settle(step, cache, plan, rules)
    return int(slots_at_once(step, cache, plan, rules, used, resident_bytes))


@bare_njit
def decides(step: Step, rules: Rules) -> bool:
    """Whether the policy decides this layer-step: prefill may be streamed or bypassed instead."""
    return step.phase != PREFILL or rules.prefill == PREFILL_POLICY


@bare_njit
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
        free_bytes = cache.total[1] - resident_bytes
        for j in range(plan.count[N_EVICTED]):
            free_bytes += cache.expert_bytes[plan.evicted[j] // cache.resident.shape[1]]
        room = free_bytes // cache.expert_bytes[step.layer]
    else:
        room = cache.capacity[step.layer] - used + plan.count[N_EVICTED]
    return int(room - plan.count[N_EVICTED_ACTIVE] + rules.staging - cache.total[2])


@bare_njit
def settle(step: Step, cache: Cache, plan: Plan, rules: Rules) -> None:
    """Who stays, and in which order transfers go."""
    if decides(step, rules):
        if rules.admission == SEQUENTIAL:
            serve_one_by_one(step, cache, plan, rules.by_mention)
        elif rules.admission != FROZEN:
            demand = rules.admission == DEMAND
            admit(step, cache, plan, demand, rules.overshoot, rules.pooled)
    arrange(step, plan)


@bare_njit
def judge(step: Step, cache: Cache, plan: Plan) -> None:
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
    for j in range(plan.count.size):
        plan.count[j] = 0


@bare_njit
def touch(step: Step, cache: Cache) -> None:
    """Renew the recency stamps of the active set."""
    for i in range(step.expert.size):
        mention = np.int64(step.last_token[i])  # the sum does not fit 32 bits
        cache.stamp[step.layer, step.expert[i]] = step.clock * STAMP_STEP + mention


@inner_njit
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
    plan.count[N_TRANSFERS] = n
    for i in range(step.expert.size):
        if plan.place[i] == ON_CPU:
            plan.count[N_CPU] += 1
        elif plan.state[i] == IN_FLIGHT:
            plan.count[N_LATE] += 1
