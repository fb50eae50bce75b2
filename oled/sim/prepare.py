"""From a trace, a policy and a machine to the arrays that the driver replays."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled._jit import announce_compilation
from oled.errors import UserError
from oled.hardware.costs import CostTables
from oled.policies.composition import Composition
from oled.policies.interface import (
    PREFILL_BYPASS,
    PREFILL_POLICY,
    PREFILL_STREAM,
    Admission,
    At,
    Cache,
    Costs,
    Plan,
    Queue,
    Rules,
    Side,
)
from oled.policies.part import ask_nothing, transfer_all
from oled.sim.arrays import (
    cost_arrays,
    new_cache,
    new_plan,
    new_queue,
    new_tally,
    side_arrays,
    timeline_room,
    workload,
)
from oled.sim.calibration import Calibration
from oled.sim.lanes import Lanes, new_lanes
from oled.sim.parts import Parts, parts_of
from oled.sim.replay import run
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.sim.state import Options, Start, State, Workload, no_step
from oled.sim.tally import Tally
from oled.trace.steps import Steps
from oled.types import Ints

_PREFILL = {"policy": PREFILL_POLICY, "stream": PREFILL_STREAM, "bypass": PREFILL_BYPASS}
_UNBOUNDED = 1 << 30  # staging slots of the accounting replay


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
    """Everything that one configuration needs."""

    parts: Parts
    prefetches: bool  # whether anything is ever copied ahead
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
    def state(self) -> State:
        """All of it that a replay works on besides parts and lanes."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        at = At(forward=-1, phase=0, block=-1, denoising_step=-1, first_of_request=False)
        shared = {name: own[name] for name in State.ref.fields if name in own}
        return State(**shared, step=no_step(self.work), at=at)

    def run(self) -> None:
        """Replay it."""
        run(self.parts, None, self.lanes, self.state)


def replay_steps(
    steps: Steps,
    costs: CostTables,
    composition: Composition,
    budget: Budget,
    settings: Settings,
    calibration: Calibration | None = None,
) -> Replay:
    """Run one configuration. Raises UserError where the cache is below the minimum (G13)."""
    announce_compilation()
    ready = assemble(steps, costs, composition, budget, settings, calibration)
    ready.run()
    while ready.lanes.entries == ready.lanes.log.shape[0]:  # the timeline is full: more room
        room = 4 * ready.lanes.log.shape[0]
        ready = assemble(steps, costs, composition, budget, settings, calibration, room)
        ready.run()
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
    capacity, start = _initial(composition, capacity, steps, calibration)
    persistent = settings.lifecycle == "persistent"
    if log_room is None:
        log_room = timeline_room(steps, *_window(steps, settings))
    return Assembly(
        parts=parts_of(composition, steps),
        prefetches=type(composition.prefetch).ask is not ask_nothing,
        work=workload(steps, request, costs, composition, persistent),
        cache=new_cache(steps, costs, budget, calibration),
        start=start,
        costs=cost_arrays(steps, costs, composition),
        plan=new_plan(layers, experts),
        side=side_arrays(steps, request, calibration, settings.seed),
        queue=new_queue(layers, experts),
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
        tally=new_tally(steps, int(request.max(initial=-1)) + 1, settings),
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


def _initial(
    composition: Composition,
    capacity: Ints,
    steps: Steps,
    calibration: Calibration,
) -> tuple[Ints, Start]:
    """Return the slots of each layer, and what a request begins with: residents u8[L, E] that are
    placed free of charge. A list over all layers gives each layer as many slots as it has on it."""
    shape = (steps.num_layers, int(steps.num_experts.max()))
    resident = np.zeros(shape, np.uint8)
    if composition.initial == "popular_overall":
        exists = np.arange(shape[1]) < steps.num_experts[:, None]
        popularity = np.where(exists, calibration.prior, -1)
        order = np.argsort(-popularity, axis=None, kind="stable")
        resident.flat[order[: int(capacity.sum())]] = 1
        capacity = resident.sum(axis=1, dtype=np.int64)
    elif composition.initial != "empty":
        for layer, slots in enumerate(capacity):
            order = np.arange(steps.num_experts[layer])
            if composition.initial == "last":
                order = order[::-1]
            if composition.initial == "popular":
                popularity = calibration.prior[layer, : steps.num_experts[layer]]
                order = np.argsort(-popularity, kind="stable")
            resident[layer, order[:slots]] = 1
    return capacity, Start(resident, capacity)
