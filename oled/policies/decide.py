"""One layer-step's decision: judge residency, let the parts decide, settle who stays.

`decide` is used unchanged by the simulator and by the live executor. Nothing here knows a clock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from oled._jit import bare_njit, inner_njit
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
    TRANSFER,
    Admission,
    Cache,
    Costs,
    Plan,
    Rules,
    Step,
)
from oled.policies.selection import select_lowest

DEMAND, SEQUENTIAL, FROZEN = (
    int(kind) for kind in (Admission.DEMAND, Admission.SEQUENTIAL, Admission.FROZEN)
)
STAMP_STEP = 1 << 32
"""Stamps are clock x 2^32 + the order of the last mention in the step, which has 31 bits."""


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
def _take_out(layer: int, expert: int, cache: Cache, plan: Plan) -> None:
    cache.resident[layer, expert] = 0
    cache.used[layer] -= 1
    cache.total[0] -= cache.expert_bytes[layer]
    plan.evicted[plan.count[N_EVICTED]] = layer * cache.resident.shape[1] + expert
    plan.count[N_EVICTED] += 1


@inner_njit
def evict(layer: int, expert: int, step: Step, cache: Cache, plan: Plan) -> None:
    """Take one resident out and note it in the plan."""
    _take_out(layer, expert, cache, plan)
    if layer == step.layer:
        i = plan.index[expert]
        if i >= 0 and plan.state[i] == RESIDENT:
            plan.count[N_EVICTED_ACTIVE] += 1


@inner_njit
def insert(layer: int, expert: int, cache: Cache) -> None:
    cache.resident[layer, expert] = 1
    cache.used[layer] += 1
    cache.total[0] += cache.expert_bytes[layer]


@inner_njit
def admit(
    step: Step, cache: Cache, plan: Plan, demand: bool, overshoot: bool, pooled: bool
) -> None:
    """Insert the newcomers, then evict the lowest until the budget holds.

    Newcomers are transferred, landed and in-flight experts of the active set. `demand`: the active
    set is protected, so what does not fit is a newcomer (lowest first), or, with `overshoot`
    (accounting replay), stays beyond the budget. Otherwise residents and newcomers compete.
    """
    layer = step.layer
    for i in range(step.expert.size):
        waits = plan.state[i] == LANDED or plan.state[i] == IN_FLIGHT
        if plan.place[i] == TRANSFER or (waits and plan.place[i] != ON_CPU):
            plan.stays[i] = 1
            insert(layer, step.expert[i], cache)
    if pooled:
        _shrink_pool(step, cache, plan, demand, overshoot)
    else:
        _shrink_layer(step, cache, plan, demand, overshoot)


@inner_njit
def _drop(expert: int, step: Step, cache: Cache, plan: Plan) -> None:
    """Take an expert of this layer out again: a newcomer does not stay, a resident is evicted."""
    i = plan.index[expert]
    if i >= 0 and plan.stays[i] == 1:
        plan.stays[i] = 0
        cache.resident[step.layer, expert] = 0
        cache.used[step.layer] -= 1
        cache.total[0] -= cache.expert_bytes[step.layer]
    else:
        evict(step.layer, expert, step, cache, plan)


@inner_njit
def _shrink_layer(step: Step, cache: Cache, plan: Plan, demand: bool, overshoot: bool) -> None:
    layer = step.layer
    surplus = cache.used[layer] - cache.capacity[layer]
    if surplus <= 0:
        return
    n = 0
    for expert in range(cache.num_experts[layer]):  # always written, kept by counting: no branch
        cache.key[n] = cache.score[layer, expert]
        cache.age[n] = cache.stamp[layer, expert]
        cache.item[n] = expert
        protected = demand & (plan.index[expert] >= 0)
        n += int((cache.resident[layer, expert] != 0) & (not protected))
    leaving = min(surplus, n)
    select_lowest(cache.key, cache.age, cache.item, n, leaving)
    for j in range(leaving):
        _drop(cache.item[j], step, cache, plan)
    surplus -= leaving
    if surplus > 0 and not overshoot:  # demand only: the newcomers with the lowest scores go
        n = 0
        for i in range(step.expert.size):
            if plan.stays[i] == 1:
                cache.key[n] = cache.score[layer, step.expert[i]]
                cache.age[n] = cache.stamp[layer, step.expert[i]]
                cache.item[n] = step.expert[i]
                n += 1
        select_lowest(cache.key, cache.age, cache.item, n, surplus)
        for j in range(surplus):
            _drop(cache.item[j], step, cache, plan)


@inner_njit
def _shrink_pool(step: Step, cache: Cache, plan: Plan, demand: bool, overshoot: bool) -> None:
    """Evict the lowest of the whole model until its bytes fit the budget.

    `cache.key/age/item[l]` keep each layer's lowest between evictions; only a layer that lost an
    expert is searched again.
    """
    if cache.total[0] <= cache.total[1]:
        return
    layers = cache.resident.shape[0]
    for layer in range(layers):
        _lowest_of_layer(layer, step, cache, plan, demand)
    while cache.total[0] > cache.total[1]:
        best = -1
        for layer in range(layers):
            if cache.item[layer] >= 0 and (
                best < 0
                or cache.key[layer] < cache.key[best]
                or (cache.key[layer] == cache.key[best] and cache.age[layer] < cache.age[best])
            ):
                best = layer
        if best < 0:
            break
        expert = cache.item[best]
        if best == step.layer:
            _drop(expert, step, cache, plan)
        else:
            evict(best, expert, step, cache, plan)
        _lowest_of_layer(best, step, cache, plan, demand)
    while cache.total[0] > cache.total[1] and not overshoot:
        lowest = -1
        for i in range(step.expert.size):
            if plan.stays[i] == 1 and (lowest < 0 or _below(step, cache, i, lowest)):
                lowest = i
        if lowest < 0:
            return
        _drop(step.expert[lowest], step, cache, plan)


@inner_njit
def _below(step: Step, cache: Cache, i: int, j: int) -> bool:
    a, b = step.expert[i], step.expert[j]
    key_a, key_b = cache.score[step.layer, a], cache.score[step.layer, b]
    older = cache.stamp[step.layer, a] < cache.stamp[step.layer, b]
    return bool(key_a < key_b or (key_a == key_b and older))


@inner_njit
def _lowest_of_layer(layer: int, step: Step, cache: Cache, plan: Plan, demand: bool) -> None:
    cache.item[layer] = -1
    for expert in range(cache.num_experts[layer]):
        if cache.resident[layer, expert] == 0:
            continue
        if demand and layer == step.layer and plan.index[expert] >= 0:
            continue
        key, age = cache.score[layer, expert], cache.stamp[layer, expert]
        if (
            cache.item[layer] < 0
            or key < cache.key[layer]
            or (key == cache.key[layer] and age < cache.age[layer])
        ):
            cache.item[layer], cache.key[layer], cache.age[layer] = expert, key, age


@inner_njit
def fit_capacity(layer: int, cache: Cache, plan: Plan) -> None:
    """Evict the lowest of a layer whose capacity was cut."""
    surplus = cache.used[layer] - cache.capacity[layer]
    if surplus <= 0:
        return
    n = 0
    for expert in range(cache.num_experts[layer]):
        if cache.resident[layer, expert] != 0:
            cache.key[n] = cache.score[layer, expert]
            cache.age[n] = cache.stamp[layer, expert]
            cache.item[n] = expert
            n += 1
    select_lowest(cache.key, cache.age, cache.item, n, surplus)
    for j in range(surplus):
        _take_out(layer, cache.item[j], cache, plan)


@bare_njit
def remember(step: Step, cache: Cache) -> None:
    """Keep the layer's scores and stamps of before this step, for `serve_one_by_one`."""
    for expert in range(cache.num_experts[step.layer]):
        cache.key[expert] = cache.score[step.layer, expert]
        cache.age[expert] = cache.stamp[step.layer, expert]


@inner_njit
def serve_one_by_one(step: Step, cache: Cache, plan: Plan, by_mention: bool) -> None:
    """Naive replay: experts one after the other, in id order or in the order of their last mention.

    Fills the whole plan. An expert evicted before its turn is a miss, and a victim may be one that
    was served a moment ago; both are what an executor without an atomic active set does. Recency
    is the order of service. Needs `remember` before the scores changed: until its turn an expert
    keeps its old score.
    """
    layer, n = step.layer, step.expert.size
    for i in range(n):
        plan.order[i] = i
        plan.rank[i] = step.last_token[i] if by_mention else i
    _sort_by_rank(plan, 0, n)
    for turn in range(n):
        i = plan.order[turn]
        expert = step.expert[i]
        if cache.resident[layer, expert] != 0:
            plan.state[i], plan.place[i] = RESIDENT, ON_GPU
        else:
            if plan.state[i] == RESIDENT:  # evicted before its turn: nothing computes in its slot
                plan.state[i] = ABSENT
                plan.count[N_EVICTED_ACTIVE] -= 1
            plan.place[i] = TRANSFER if plan.state[i] == ABSENT else ON_GPU
            while cache.used[layer] > 0 and cache.used[layer] >= cache.capacity[layer]:
                _drop(_victim(layer, cache), step, cache, plan)
            if cache.used[layer] < cache.capacity[layer]:
                plan.stays[i] = 1
                insert(layer, expert, cache)
        cache.stamp[layer, expert] = step.clock * STAMP_STEP + turn
        cache.key[expert] = cache.score[layer, expert]
        cache.age[expert] = cache.stamp[layer, expert]
    for i in range(n):
        plan.rank[i] = step.last_token[i] if by_mention else i


@inner_njit
def _victim(layer: int, cache: Cache) -> int:
    best = -1
    for expert in range(cache.num_experts[layer]):
        if cache.resident[layer, expert] != 0 and (
            best < 0
            or cache.key[expert] < cache.key[best]
            or (cache.key[expert] == cache.key[best] and cache.age[expert] < cache.age[best])
        ):
            best = expert
    return best


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
        _sort_by_rank(plan, first, n)
    plan.count[N_TRANSFERS] = n
    for i in range(step.expert.size):
        if plan.place[i] == ON_CPU:
            plan.count[N_CPU] += 1
        elif plan.state[i] == IN_FLIGHT:
            plan.count[N_LATE] += 1


@inner_njit
def _sort_by_rank(plan: Plan, first: int, last: int) -> None:
    """Stable insertion sort of `plan.order[first:last]` by rank (mostly sorted, mostly short)."""
    for j in range(first + 1, last):
        item = plan.order[j]
        rank = plan.rank[item]
        k = j
        while k > first and plan.rank[plan.order[k - 1]] > rank:
            plan.order[k] = plan.order[k - 1]
            k -= 1
        plan.order[k] = item
