"""What becomes of experts that were fetched ahead: used, joined to the residents, or given back."""

from __future__ import annotations

from oled._jit import jitable, shared_njit
from oled.policies.interface import (
    FILL,
    IN_FLIGHT,
    LANDED,
    NOT_STAGED,
    ON_CPU,
    PREFETCHED,
    STAGED,
    STAGED_FILL,
    TRANSFERRED,
    Cache,
    Plan,
    Rules,
    Step,
)
from oled.sim.lanes import (
    WASTED,
    Lanes,
)


@jitable
def settle_landed(lanes: Lanes, routed: int, busy_layer: int, cache: Cache, rules: Rules) -> int:
    """An expert fetched ahead has landed: a FILL joins its layer now, one too late is given back.

    What belongs to the layer that is executing (`busy_layer`, -1 if none) waits for its end.
    Returns how many slots the executing layer-step may take now in addition; see `join_residents`.
    """
    layer, expert = lanes.copying.layer, lanes.copying.expert
    if layer == busy_layer:
        return 0
    if lanes.copying.kind == FILL:
        return int(join_residents(lanes, layer, expert, cache, rules, busy_layer))
    if lanes.copying.due <= routed:
        give_back(lanes, layer, expert, cache)
        return 1
    return 0


@jitable
def give_back(lanes: Lanes, layer: int, expert: int, cache: Cache) -> None:
    """Free a staging slot whose expert was fetched in vain."""
    cache.staged[layer, expert] = NOT_STAGED
    cache.staged_experts -= 1
    lanes.moved[WASTED] += cache.expert_bytes[layer]


@jitable
def join_residents(
    lanes: Lanes, layer: int, expert: int, cache: Cache, rules: Rules, busy_layer: int
) -> int:
    """Re-label a staging slot: a newcomer takes free room, or replaces the lowest resident of its
    layer (in global scope too) if it stands above it.

    Returns the slots that `busy_layer` (-1 if none) may take now in addition: 1, that of staging,
    less those that the newcomer's bytes took from the pool's free room, which was everybody's. With
    experts of one size that is 0; a large newcomer takes more slots of small experts than it gives
    back.
    """
    if rules.pooled:
        full = cache.resident_bytes + cache.expert_bytes[layer] > cache.budget_bytes
    else:
        full = cache.used[layer] >= cache.capacity[layer]
    if full:
        lowest = -1
        for other in range(cache.num_experts[layer]):
            if cache.resident[layer, other] != 0 and (
                lowest < 0
                or cache.score[layer, other] < cache.score[layer, lowest]
                or (
                    cache.score[layer, other] == cache.score[layer, lowest]
                    and cache.stamp[layer, other] < cache.stamp[layer, lowest]
                )
            ):
                lowest = other
        above = lowest >= 0 and (
            cache.score[layer, expert] > cache.score[layer, lowest]
            or (
                cache.score[layer, expert] == cache.score[layer, lowest]
                and cache.stamp[layer, expert] > cache.stamp[layer, lowest]
            )
        )
        if not above:
            give_back(lanes, layer, expert, cache)
            return 1
        if cache.fresh[layer, lowest] & PREFETCHED:
            lanes.moved[WASTED] += cache.expert_bytes[layer]
        cache.fresh[layer, lowest] &= TRANSFERRED
        cache.resident[layer, lowest] = 0
        cache.used[layer] -= 1
        cache.resident_bytes -= cache.expert_bytes[layer]
    slots = 1
    if rules.pooled and not full and busy_layer >= 0:
        size = cache.expert_bytes[busy_layer]
        free = cache.budget_bytes - cache.resident_bytes
        slots -= free // size - (free - cache.expert_bytes[layer]) // size
    cache.staged[layer, expert] = NOT_STAGED
    cache.staged_experts -= 1
    cache.resident[layer, expert] = 1
    cache.fresh[layer, expert] |= PREFETCHED
    cache.used[layer] += 1
    cache.resident_bytes += cache.expert_bytes[layer]
    return int(slots)


@shared_njit
def clear_layer(lanes: Lanes, step: Step, plan: Plan, cache: Cache, rules: Rules) -> None:
    """After a layer its staged experts leave staging (used ones are re-labelled), FILLs join.

    One that the step used and that stays is a resident by now; one that does not has done its work.
    What was fetched for a later layer-step waits for it.
    """
    layer = step.layer
    if cache.staged_experts == 0:
        return
    for expert in range(cache.num_experts[layer]):
        if cache.staged[layer, expert] < STAGED:
            continue
        i = plan.index[expert]
        found = i >= 0 and (plan.state[i] == LANDED or plan.state[i] == IN_FLIGHT)
        if found and plan.place[i] != ON_CPU:
            cache.staged[layer, expert] = NOT_STAGED
            cache.staged_experts -= 1
        elif cache.staged[layer, expert] == STAGED_FILL:
            join_residents(lanes, layer, expert, cache, rules, -1)
        elif lanes.due[layer, expert] <= step.index:
            give_back(lanes, layer, expert, cache)
