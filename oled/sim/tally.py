"""What a replay counts: by request and phase, by layer, by forward; and the plan log."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled._jit import jitable, shared_njit
from oled.policies.interface import (
    DROPPED,
    GATE,
    IN_FLIGHT,
    LANDED,
    ON_CPU,
    ON_GPU,
    PREFETCHED,
    RESIDENT,
    TRANSFER,
    TRANSFERRED,
    Cache,
    Plan,
    Step,
)
from oled.policies.struct import Cube, Matrix, Struct, Vector
from oled.sim.lanes import (
    LATE,
    LOG_USE,
    USEFUL,
    WASTED,
    Lanes,
    note,
)

# Columns of Tally.by_phase
(
    ACCESSES,
    HITS,
    RESIDENT_HITS,
    TOKEN_ACCESSES,
    TOKEN_HITS,
    BYTES_ACCESSED,
    BYTES_HIT,
    ATTAINABLE,
    SLOTS,
    TRANSFERS,
    LATE_MISSES,
    CPU_MISSES,
    CPU_RESIDENTS,
    DROPPED_MISSES,
    DROPPED_MASS,
    GATE_MASS,
    MOVED_BYTES,
    USEFUL_BYTES,
    WASTED_BYTES,
    LATE_BYTES,
    TRANSFERRED_BEFORE,
    REUSED,
    STALL_COPY,
    STALL_CPU,
    STALL_POLICY,
    BUSY_GPU,
    BUSY_H2D,
    BUSY_D2H,
    BUSY_CPU,
    LAYER_STEPS,
    FORWARDS,
    TIME,
    COLUMNS,
) = range(33)

MILLION = 1_000_000
"""Gate mass is booked in millionths of a token's; a token's weights add up to one."""

# Columns of Tally.by_layer
L_ACCESSES, L_HITS, L_TRANSFERS, L_CPU, L_SLOTS, L_STEPS, L_TIME, L_COLUMNS = range(8)


class Tally(Struct):
    """What a replay has counted."""

    by_phase: Cube[np.int64]  # [requests, phases, COLUMNS]
    by_layer: Matrix[np.int64]  # [L, L_COLUMNS]
    begin_ns: Vector[np.int64]  # [F]
    end_ns: Vector[np.int64]  # [F]
    stall_booked: Vector[np.int64]  # [3] what the lanes had done at the last booking: stalls,
    busy_booked: Vector[np.int64]  # [4] work
    moved_booked: Vector[np.int64]  # [4] and bytes
    plans: Vector[np.uint8]  # [N] state | place << 2 | stays << 4; [0] if not wanted
    orders: Vector[np.int32]  # [N] place in the transfer order, -1 if none; [0] if not wanted
    slots: Matrix[np.int32]  # [S, 2] free at once, and when the hits have computed; [0, 2]


@jitable
def book_evicted(cache: Cache, plan: Plan, lanes: Lanes) -> None:
    """An expert fetched ahead that leaves before its first use was fetched in vain."""
    for j in range(plan.evictions):
        layer = plan.evicted[j] // cache.resident.shape[1]
        expert = plan.evicted[j] % cache.resident.shape[1]
        if cache.fresh[layer, expert] & PREFETCHED:
            lanes.moved[WASTED] += cache.expert_bytes[layer]
            cache.fresh[layer, expert] &= TRANSFERRED


@shared_njit
def count_step(
    step: Step, cache: Cache, plan: Plan, lanes: Lanes, tally: Tally, request: int
) -> None:
    """Book a decided layer-step; before the clock runs it."""
    row = tally.by_phase[request, step.phase]
    per_layer = tally.by_layer[step.layer]
    layer, size = step.layer, cache.expert_bytes[step.layer]
    active = step.expert.size
    before = 0
    for expert in range(cache.num_experts[layer]):
        before += int((cache.fresh[layer, expert] & TRANSFERRED) != 0)
    row[TRANSFERRED_BEFORE] += before
    hits, resident_hits, misses_cpu, transfers = 0, 0, 0, 0
    held = cache.used[layer]  # residents before this step: those now, less who came, and who left
    for j in range(plan.evictions):
        held += int(plan.evicted[j] // cache.resident.shape[1] == layer)
    for i in range(active):
        expert, state, place = step.expert[i], plan.state[i], plan.place[i]
        tokens = step.count[i]
        row[TOKEN_ACCESSES] += tokens
        if cache.fresh[layer, expert] & TRANSFERRED:
            row[REUSED] += 1
        hit = state == RESIDENT or (state == LANDED and place != ON_CPU)
        if hit:
            hits += 1
            resident_hits += int(state == RESIDENT)
            row[TOKEN_HITS] += tokens
            if state == LANDED or cache.fresh[layer, expert] & PREFETCHED:
                lanes.moved[USEFUL] += size
                cache.fresh[layer, expert] &= TRANSFERRED
                if state == RESIDENT and place == ON_GPU:
                    now = lanes.now
                    note(lanes, LOG_USE, now, now, step.forward, layer, np.int64(expert))
            if place == ON_CPU:
                row[CPU_RESIDENTS] += 1
        elif place == TRANSFER:
            transfers += 1
        elif place == ON_CPU:
            misses_cpu += 1
        elif place == DROPPED:
            row[DROPPED_MISSES] += 1
            row[DROPPED_MASS] += int(float(step.mass[i, GATE]) * MILLION)
        elif state == IN_FLIGHT:
            row[LATE_MISSES] += 1
            lanes.moved[LATE] += size
        held -= int(state != RESIDENT and cache.resident[layer, expert] != 0)
    for expert in range(cache.num_experts[layer]):
        cache.fresh[layer, expert] &= PREFETCHED
    for i in range(active):
        if plan.place[i] == TRANSFER:
            cache.fresh[layer, step.expert[i]] |= TRANSFERRED
    book_evicted(cache, plan, lanes)
    slots = max(cache.capacity[layer], held)  # in global scope a layer may hold more than a share
    row[GATE_MASS] += step.tokens * MILLION
    row[ACCESSES] += active
    row[HITS] += hits
    row[RESIDENT_HITS] += resident_hits
    row[BYTES_ACCESSED] += active * size
    row[BYTES_HIT] += hits * size
    row[ATTAINABLE] += min(active, slots)
    row[SLOTS] += slots
    row[TRANSFERS] += transfers
    row[CPU_MISSES] += misses_cpu
    row[LAYER_STEPS] += 1
    per_layer[L_ACCESSES] += active
    per_layer[L_HITS] += hits
    per_layer[L_TRANSFERS] += transfers
    per_layer[L_CPU] += misses_cpu
    per_layer[L_SLOTS] += slots
    per_layer[L_STEPS] += 1


@shared_njit
def write_plan(step: Step, plan: Plan, tally: Tally, first: int) -> None:
    if tally.plans.size == 0:
        return
    for i in range(step.expert.size):
        tally.plans[first + i] = plan.state[i] | plan.place[i] << 2 | plan.stays[i] << 4
        tally.orders[first + i] = -1
    for j in range(plan.transfers):
        tally.orders[first + plan.order[j]] = j


@shared_njit
def write_slots(step: Step, plan: Plan, slots: int, tally: Tally) -> None:
    if tally.slots.size > 0:
        tally.slots[step.index, 0] = slots
        tally.slots[step.index, 1] = plan.evicted_active


@shared_njit
def book_lanes(lanes: Lanes, tally: Tally, row: NDArray[np.int64], elapsed: int) -> None:
    """Add what the lanes did since the last booking to a row i64[COLUMNS] of `tally.by_phase`."""
    _book(lanes.stall, tally.stall_booked, row, STALL_COPY)
    _book(lanes.busy, tally.busy_booked, row, BUSY_GPU)
    _book(lanes.moved, tally.moved_booked, row, MOVED_BYTES)
    row[FORWARDS] += 1
    row[TIME] += elapsed


@jitable
def _book(
    done: NDArray[np.int64], booked: NDArray[np.int64], row: NDArray[np.int64], first: int
) -> None:
    for j in range(done.size):
        row[first + j] += done[j] - booked[j]
        booked[j] = done[j]
