"""The arrays that the driver replays, made from steps, costs and calibration."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled.hardware.costs import CostTables
from oled.policies.composition import Composition
from oled.policies.interface import (
    Cache,
    Costs,
    Plan,
    Queue,
    Side,
)
from oled.sim.calibration import Calibration
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.sim.state import Workload
from oled.sim.tally import COLUMNS, L_COLUMNS, Tally
from oled.trace.schema import Phase
from oled.trace.steps import Steps, coming_scores, next_use

_LOG_ENTRIES_PER_EXPERT = 3


def new_tally(steps: Steps, requests: int, settings: Settings) -> Tally:
    entries = steps.expert.size if settings.plans else 0
    return Tally(
        by_phase=np.zeros((requests, len(Phase), COLUMNS), np.int64),
        by_layer=np.zeros((steps.num_layers, L_COLUMNS), np.int64),
        begin_ns=np.zeros(steps.num_forwards, np.int64),
        end_ns=np.zeros(steps.num_forwards, np.int64),
        stall_booked=np.zeros(3, np.int64),
        busy_booked=np.zeros(4, np.int64),
        moved_booked=np.zeros(4, np.int64),
        plans=np.zeros(entries, np.uint8),
        orders=np.zeros(entries, np.int32),
        slots=np.zeros((steps.num_steps if settings.plans else 0, 2), np.int32),
    )


def new_cache(
    steps: Steps,
    costs: CostTables,
    budget: Budget,
    calibration: Calibration,
) -> Cache:
    layers, experts = steps.num_layers, int(steps.num_experts.max())
    shape = (layers, experts)
    scratch = 2 * max(experts, layers)  # select_lowest works in one half, partitions in the other
    return Cache(
        resident=np.zeros(shape, np.uint8),
        score=np.zeros(shape),
        stamp=np.zeros(shape, np.int64),
        staged=np.zeros(shape, np.uint8),
        fresh=np.zeros(shape, np.uint8),
        capacity=np.zeros(layers, np.int64),
        used=np.zeros(layers, np.int64),
        resident_bytes=0,
        budget_bytes=budget.total_bytes,
        staged_experts=0,
        num_experts=steps.num_experts,
        expert_bytes=costs.expert_bytes,
        prior=np.ascontiguousarray(calibration.prior),
        key=np.zeros(scratch),
        age=np.zeros(scratch, np.int64),
        item=np.zeros(scratch, np.int64),
    )


def workload(
    steps: Steps,
    request: NDArray[np.int64],
    costs: CostTables,
    composition: Composition,
    persistent: bool,
) -> Workload:
    oracle = "future" in composition.needs
    foresees = "coming" in composition.needs
    return Workload(
        request=request,
        phase=steps.phase,
        block=steps.block,
        denoising_step=steps.step,
        tokens=steps.tokens,
        step_offsets=steps.step_offsets,
        layer=steps.layer,
        offsets=steps.offsets,
        expert=steps.expert,
        count=steps.count,
        mass=steps.mass,
        last_token=steps.last_token,
        next_use=next_use(steps, persistent) if oracle else np.zeros(0, np.int64),
        scores=steps.scores if steps.scores is not None else np.zeros((1, 0), np.float32),
        coming=coming_scores(steps) if foresees else np.zeros((1, 0), np.float32),
        head_ns=costs.head_ns,
        dense_ns=costs.dense_of_steps(costs.dense_ns, steps),
    )


def cost_arrays(steps: Steps, costs: CostTables, composition: Composition) -> Costs:
    overhead = composition.overhead_ns
    return Costs(
        layer_class=costs.layer_class,
        gpu_ns=costs.gpu_ns,
        cpu_ns=costs.cpu_ns,
        copy_ns=costs.copy_ns,
        copy_out_ns=costs.copy_out_ns,
        act_out_ns=costs.act_out_ns,
        act_back_ns=costs.act_back_ns,
        copy_wake_ns=int(costs.copy_wake_ns),
        cpu_call_ns=int(costs.cpu_call_ns),
        policy_ns=int(costs.policy_ns if overhead is None else overhead),
        cpu_contention_ppm=int(costs.cpu_contention_ppm),
        link_contention_ppm=int(costs.link_contention_ppm),
        top_k=int(steps.top_k),
    )


def new_plan(layers: int, experts: int) -> Plan:
    return Plan(
        state=np.zeros(experts, np.uint8),
        place=np.zeros(experts, np.uint8),
        rank=np.zeros(experts),
        stays=np.zeros(experts, np.uint8),
        order=np.zeros(experts, np.int64),
        evicted=np.zeros(layers * experts, np.int64),
        index=np.zeros(experts, np.int64),
        transfers=0,
        evictions=0,
        evicted_active=0,
        on_cpu=0,
        late=0,
    )


def side_arrays(
    steps: Steps, request: NDArray[np.int64], calibration: Calibration, seed: int
) -> Side:
    empty = np.zeros(0, np.int64)
    return Side(
        offsets=steps.offsets,
        expert=steps.expert,
        layer=steps.layer,
        forward=steps.forward,
        forward_request=request,
        pred_offsets=steps.pred_offsets if steps.pred_offsets is not None else empty,
        pred_expert=(
            steps.pred_expert if steps.pred_expert is not None else np.zeros(0, np.uint16)
        ),
        pred_score=steps.pred_score if steps.pred_score is not None else np.zeros(0, np.float32),
        horizons=int(steps.horizons),
        store=np.ascontiguousarray(calibration.store),
        seed=seed,
    )


def new_queue(layers: int, experts: int) -> Queue:
    room = max(64, layers * experts)
    return Queue(
        layer=np.zeros(room, np.int64),
        expert=np.zeros(room, np.int64),
        kind=np.zeros(room, np.int64),
        due=np.zeros(room, np.int64),
        chunks=np.zeros(room, np.int64),
        begin=0,
        end=0,
    )


def timeline_room(steps: Steps, first: int, last: int) -> int:
    """Timeline entries that the forwards `first` to `last` will hardly exceed."""
    if last == first:
        return 0
    lo, hi = steps.step_offsets[first], steps.step_offsets[last]
    active = int(steps.offsets[hi] - steps.offsets[lo])
    prefetches = 64 * int(hi - lo)
    return _LOG_ENTRIES_PER_EXPERT * active + 8 * int(hi - lo) + 4 * (last - first) + prefetches
