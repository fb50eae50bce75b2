"""Who becomes and who stays resident: newcomers in, the lowest out until the budget holds."""

from __future__ import annotations

import numpy as np

from oled._jit import jitable
from oled.policies.interface import (
    IN_FLIGHT,
    LANDED,
    ON_CPU,
    RESIDENT,
    TRANSFER,
    Cache,
    Plan,
    Step,
)
from oled.policies.selection import select_lowest


@jitable
def _take_out(layer: int, expert: int, cache: Cache, plan: Plan) -> None:
    cache.resident[layer, expert] = 0
    cache.used[layer] -= 1
    cache.resident_bytes -= cache.expert_bytes[layer]
    plan.evicted[plan.evictions] = layer * cache.resident.shape[1] + expert
    plan.evictions += 1


@jitable
def evict(layer: int, expert: int, step: Step, cache: Cache, plan: Plan) -> None:
    """Take one resident out and note it in the plan."""
    _take_out(layer, expert, cache, plan)
    if layer == step.layer:
        i = plan.index[expert]
        if i >= 0 and plan.state[i] == RESIDENT:
            plan.evicted_active += 1


@jitable
def insert(layer: int, expert: int, cache: Cache) -> None:
    cache.resident[layer, expert] = 1
    cache.used[layer] += 1
    cache.resident_bytes += cache.expert_bytes[layer]


@jitable
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
            insert(layer, np.int64(step.expert[i]), cache)
    if pooled:
        _shrink_pool(step, cache, plan, demand, overshoot)
    else:
        _shrink_layer(step, cache, plan, demand, overshoot)


@jitable
def drop(expert: int, step: Step, cache: Cache, plan: Plan) -> None:
    """Take an expert of this layer out again: a newcomer does not stay, a resident is evicted."""
    i = plan.index[expert]
    if i >= 0 and plan.stays[i] == 1:
        plan.stays[i] = 0
        cache.resident[step.layer, expert] = 0
        cache.used[step.layer] -= 1
        cache.resident_bytes -= cache.expert_bytes[step.layer]
    else:
        evict(step.layer, expert, step, cache, plan)


@jitable
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
        drop(cache.item[j], step, cache, plan)
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
            drop(cache.item[j], step, cache, plan)


@jitable
def _shrink_pool(step: Step, cache: Cache, plan: Plan, demand: bool, overshoot: bool) -> None:
    """Evict the lowest of the whole model until its bytes fit the budget.

    `cache.key/age/item[l]` keep each layer's lowest between evictions; only a layer that lost an
    expert is searched again.
    """
    if cache.resident_bytes <= cache.budget_bytes:
        return
    layers = cache.resident.shape[0]
    for layer in range(layers):
        _lowest_of_layer(layer, step, cache, plan, demand)
    while cache.resident_bytes > cache.budget_bytes:
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
            drop(expert, step, cache, plan)
        else:
            evict(best, expert, step, cache, plan)
        _lowest_of_layer(best, step, cache, plan, demand)
    while cache.resident_bytes > cache.budget_bytes and not overshoot:
        lowest = -1
        for i in range(step.expert.size):
            if plan.stays[i] == 1 and (lowest < 0 or _below(step, cache, i, lowest)):
                lowest = i
        if lowest < 0:
            return
        drop(np.int64(step.expert[lowest]), step, cache, plan)


@jitable
def _below(step: Step, cache: Cache, i: int, j: int) -> bool:
    a, b = step.expert[i], step.expert[j]
    key_a, key_b = cache.score[step.layer, a], cache.score[step.layer, b]
    older = cache.stamp[step.layer, a] < cache.stamp[step.layer, b]
    return bool(key_a < key_b or (key_a == key_b and older))


@jitable
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


@jitable
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
