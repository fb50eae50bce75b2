"""From a trace, a policy and a machine to the arrays that the driver replays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.hardware.costs import CostTables
from oled.policies.composition import Composition
from oled.policies.interface import (
    PREFILL_BYPASS,
    PREFILL_POLICY,
    PREFILL_STREAM,
    Admission,
    Cache,
    Costs,
    Plan,
    Queue,
    Rules,
    Side,
)
from oled.policies.part import ask_nothing, transfer_all
from oled.sim.lanes import Lanes, new_lanes
from oled.sim.replay import (
    COLUMNS,
    L_COLUMNS,
    Options,
    Start,
    Tally,
    Workload,
    run,
)
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.trace.schema import Phase
from oled.trace.steps import Steps, next_use

_PREFILL = {"policy": PREFILL_POLICY, "stream": PREFILL_STREAM, "bypass": PREFILL_BYPASS}
_LOG_ENTRIES_PER_EXPERT = 3
_UNBOUNDED = 1 << 30  # staging slots of the accounting replay


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """What was learned from another trace."""

    prior: NDArray[np.float64]  # [L, E] share of the layer's tokens that an expert took
    store: NDArray[np.float64]  # [M, L, E] one activation matrix a request

    @classmethod
    def none(cls, layers: int, experts: int) -> Calibration:
        return cls(np.zeros((layers, experts)), np.zeros((0, layers, experts)))

    @classmethod
    def from_steps(cls, steps: Steps) -> Calibration:
        """Token counts per request, layer and expert, rows normalised to sum 1."""
        experts = int(steps.num_experts.max())
        requests = np.unique(steps.request, return_inverse=True)[1]
        entry_step = np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))
        store = np.zeros((int(requests.max()) + 1, steps.num_layers, experts))
        where = (requests[steps.forward[entry_step]], steps.layer[entry_step], steps.expert)
        np.add.at(store, where, steps.count)
        prior = store.sum(axis=0)
        return cls(
            prior / np.maximum(prior.sum(axis=1, keepdims=True), 1.0),
            store / np.maximum(store.sum(axis=2, keepdims=True), 1.0),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """A finished replay: what the driver counted and the lanes' log."""

    tally: Tally
    lanes: Lanes
    cache: Cache
    groups: NDArray[np.int64]  # request (or batch group) of each row of tally.by_phase
    initial_residents: int  # placed free of charge before each request


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly:
    """Everything that one configuration needs; `data` are the arguments of `replay.replay`."""

    functions: tuple[Any, ...]  # observe, watch, allocate, dispatch, ask
    params: tuple[NDArray[np.float64], ...]
    memory: tuple[NDArray[np.float64], ...]
    learned: tuple[bool, ...]
    work: Workload
    cache: Cache
    start: Start
    costs: Costs
    plan: Plan
    side: Side
    queue: Queue
    lanes: Lanes
    rules: Rules
    options: Options
    tally: Tally

    @property
    def data(self) -> tuple[Any, ...]:
        names = [field.name for field in dataclasses.fields(self)][1:]
        return tuple(getattr(self, name) for name in names)


def replay_steps(
    steps: Steps,
    costs: CostTables,
    composition: Composition,
    budget: Budget,
    settings: Settings,
    calibration: Calibration | None = None,
) -> Replay:
    """Run one configuration. Raises UserError where the cache is below the minimum (G13)."""
    ready = assemble(steps, costs, composition, budget, settings, calibration)
    run(ready.functions, *ready.data)
    while ready.lanes.logged[0] == ready.lanes.log.shape[0]:  # the timeline is full: more room
        room = 4 * ready.lanes.log.shape[0]
        ready = assemble(steps, costs, composition, budget, settings, calibration, room)
        run(ready.functions, *ready.data)
    initial = int(ready.start.resident.sum())
    return Replay(ready.tally, ready.lanes, ready.cache, np.unique(steps.request), initial)


def assemble(
    steps: Steps,
    costs: CostTables,
    composition: Composition,
    budget: Budget,
    settings: Settings,
    calibration: Calibration | None = None,
    log_room: int | None = None,
) -> Assembly:
    """The arrays of one configuration, at its beginning; `log_room` entries for the timeline."""
    layers, experts = steps.num_layers, int(steps.num_experts.max())
    if calibration is None:
        calibration = Calibration.none(layers, experts)
    pooled = (composition.scope or settings.scope) == "global"
    _refuse(composition, settings, pooled)
    request = np.unique(steps.request, return_inverse=True)[1].astype(np.int64)
    capacity = composition.allocation.initial(
        budget.capacity, steps.num_experts, costs.expert_bytes
    )
    parts = composition.parts
    persistent = settings.lifecycle == "persistent"
    if log_room is None:
        log_room = _log_room(steps, *_window(steps, settings))
    return Assembly(
        functions=(
            composition.retention.observe,
            composition.allocation.watch,
            composition.allocation.allocate,
            composition.dispatch.dispatch,
            composition.prefetch.ask,
        ),
        params=tuple(part.params() for part in parts),
        memory=tuple(np.zeros(part.memory_shape(layers, experts)) for part in parts),
        learned=tuple(part.learned for part in parts),
        work=_workload(steps, request, costs, composition, persistent),
        cache=_cache(steps, costs, budget, calibration),
        start=Start(_initial(composition, capacity, steps, calibration, pooled), capacity),
        costs=_costs(steps, costs, composition),
        plan=_plan(layers, experts),
        side=_side(steps, request, calibration, settings.seed),
        queue=_queue(layers, experts),
        lanes=new_lanes(log_room, layers, experts),
        rules=Rules(
            int(composition.admission),
            composition.by_mention,
            settings.unbounded,
            pooled,
            _UNBOUNDED if settings.unbounded else settings.staging_slots,
            _PREFILL[composition.prefill],
        ),
        options=Options(
            persistent, composition.overlap, composition.writes_back, *_window(steps, settings)
        ),
        tally=_tally(steps, int(request.max(initial=-1)) + 1, settings),
    )


def _refuse(composition: Composition, settings: Settings, pooled: bool) -> None:
    """Configurations that cannot run are refused before anything begins."""
    copies = composition.dispatch.transfers or composition.prefill != "policy"
    if copies and not settings.unbounded and settings.staging_slots < 1:
        raise UserError(
            f"cache.staging=0: policy '{composition.name}' copies experts and needs at least "
            "1 staging slot (0 only where all misses run on the CPU)"
        )
    if pooled and composition.admission is Admission.SEQUENTIAL:
        raise UserError(
            f"policy '{composition.name}' serves one layer's experts one by one; "
            "it has no global scope: use cache.scope=layer"
        )
    one_by_one = composition.admission is Admission.SEQUENTIAL
    if one_by_one and type(composition.dispatch).dispatch is not transfer_all:
        raise UserError(
            f"policy '{composition.name}' serves experts one by one and copies what is missing: "
            "it takes no other dispatch"
        )
    if not composition.overlap and type(composition.prefetch).ask is not ask_nothing:
        raise UserError(
            f"policy '{composition.name}' waits for every copy (overlap: false): it cannot prefetch"
        )


def _window(steps: Steps, settings: Settings) -> tuple[int, int]:
    """Forwards of the timeline: first, one past the last."""
    if settings.timeline is None:
        return 0, 0
    first, number = settings.timeline
    if not 0 <= first < steps.num_forwards or number < 1:
        raise UserError(
            f"timeline window [{first}, {number}]: the trace has forwards 0 to "
            f"{steps.num_forwards - 1}; write [first, number]"
        )
    return first, min(first + number, steps.num_forwards)


def _tally(steps: Steps, requests: int, settings: Settings) -> Tally:
    entries = steps.expert.size if settings.plans else 0
    return Tally(
        by_phase=np.zeros((requests, len(Phase), COLUMNS), np.int64),
        by_layer=np.zeros((steps.num_layers, L_COLUMNS), np.int64),
        begin_ns=np.zeros(steps.num_forwards, np.int64),
        end_ns=np.zeros(steps.num_forwards, np.int64),
        before=np.zeros(11, np.int64),
        plans=np.zeros(entries, np.uint8),
        orders=np.zeros(entries, np.int32),
    )


def _initial(
    composition: Composition,
    capacity: NDArray[np.int64],
    steps: Steps,
    calibration: Calibration,
    pooled: bool,
) -> NDArray[np.uint8]:
    """Residents u8[L, E] that are placed free of charge before a request."""
    resident = np.zeros((steps.num_layers, int(steps.num_experts.max())), np.uint8)
    if composition.initial == "empty":
        return resident
    if pooled:
        raise UserError(f"policy '{composition.name}': initial residents need cache.scope=layer")
    for layer, slots in enumerate(capacity):
        order = np.arange(steps.num_experts[layer])
        if composition.initial == "popular":
            popularity = calibration.prior[layer, : steps.num_experts[layer]]
            order = np.argsort(-popularity, kind="stable")
        resident[layer, order[:slots]] = 1
    return resident


def _cache(
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
        total=np.array([0, budget.total_bytes, 0], np.int64),
        num_experts=steps.num_experts,
        expert_bytes=costs.expert_bytes,
        prior=np.ascontiguousarray(calibration.prior),
        key=np.zeros(scratch),
        age=np.zeros(scratch, np.int64),
        item=np.zeros(scratch, np.int64),
    )


def _workload(
    steps: Steps,
    request: NDArray[np.int64],
    costs: CostTables,
    composition: Composition,
    persistent: bool,
) -> Workload:
    oracle = "future" in composition.needs
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
        head_ns=costs.head_ns,
        dense_ns=costs.dense_ns,
    )


def _costs(steps: Steps, costs: CostTables, composition: Composition) -> Costs:
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
        contention_ppm=int(costs.contention_ppm),
        top_k=int(steps.top_k),
    )


def _plan(layers: int, experts: int) -> Plan:
    return Plan(
        state=np.zeros(experts, np.uint8),
        place=np.zeros(experts, np.uint8),
        rank=np.zeros(experts),
        stays=np.zeros(experts, np.uint8),
        order=np.zeros(experts, np.int64),
        evicted=np.zeros(layers * experts, np.int64),
        index=np.zeros(experts, np.int64),
        count=np.zeros(8, np.int64),
    )


def _side(steps: Steps, request: NDArray[np.int64], calibration: Calibration, seed: int) -> Side:
    empty = np.zeros(0, np.int64)
    return Side(
        offsets=steps.offsets,
        expert=steps.expert,
        step_layer=steps.layer,
        step_forward=steps.forward,
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


def _queue(layers: int, experts: int) -> Queue:
    room = max(64, layers * experts)
    return Queue(
        layer=np.zeros(room, np.int64),
        expert=np.zeros(room, np.int64),
        kind=np.zeros(room, np.int64),
        due=np.zeros(room, np.int64),
        chunks=np.zeros(room, np.int64),
        span=np.zeros(2, np.int64),
    )


def _log_room(steps: Steps, first: int, last: int) -> int:
    """Timeline entries that the forwards `first` to `last` will hardly exceed."""
    if last == first:
        return 0
    lo, hi = steps.step_offsets[first], steps.step_offsets[last]
    active = int(steps.offsets[hi] - steps.offsets[lo])
    prefetches = 64 * int(hi - lo)
    return _LOG_ENTRIES_PER_EXPERT * active + 8 * int(hi - lo) + 4 * (last - first) + prefetches
