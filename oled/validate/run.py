"""Live runs and simulations of the same routing, configuration by configuration."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from oled.hardware import CostTables, Profile, Runtime, build_costs
from oled.hardware.labels import foreign
from oled.live.backends.kinds import EMULATED, Kind
from oled.live.executor import device_slots, refuse_giving_up, refuse_unsupported
from oled.live.given import difference
from oled.live.machine import machine
from oled.live.outputs import Outputs
from oled.live.planlog import PlanLog, equal_share
from oled.live.replay import LiveReplay, live_replay
from oled.live.routing import Routing, form_of
from oled.live.store import NUMBERS, HostStore
from oled.models.catalogue import ModelGeometry
from oled.policies.composition import Composition, load_composition
from oled.sim import lanes as ln
from oled.sim.api import calibrate, refuse_what_is_missing
from oled.sim.calibration import Calibration
from oled.sim.prepare import assemble, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import Budget, parse_slots
from oled.sim.subject import Subject
from oled.trace import Trace
from oled.trace.steps import Steps
from oled.validate.devices import definitions, judge_device
from oled.validate.judge import DEFINITIONS, LANES, Pair, is_busy, judge, row
from oled.validate.pace import Pace

log = logging.getLogger("oled")

_LANE_OF = {
    ln.LOG_HITS: 0,
    ln.LOG_LANDED: 0,
    ln.LOG_COPY: 1,
    ln.LOG_PREFETCH: 1,
    ln.LOG_OUT: 2,
    ln.LOG_BACK: 2,
    ln.LOG_CPU: 3,
}
_ROOM_TO_WORK = 512 * 2**20  # on a device, beside the slots; assumed
_STREAMED = 8  # staging slots of the resident run where the device does not hold all experts
RESIDENT = Composition.from_mapping(
    {
        "name": "all_resident",
        "description": "every expert has its slot: the outputs that all others must have",
        "retention": {"_target_": "oled.policies.retention.lru.Lru"},
        "admission": "frozen",
        "initial": "first",
    },
    "all_resident",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which configurations, on how much of the trace, and how often."""

    policies: tuple[str | Composition, ...]
    slots: tuple[int | float | str, ...]
    forwards: int  # from the first one on
    repeats: int = 3
    budget_s: float = 0.0  # while less has passed, disturbed configurations are run again


@dataclass(frozen=True, slots=True)
class Configuration:
    """One policy with one cache, ready to run."""

    routing: Routing  # with what the policy's predictor said
    composition: Composition
    settings: Settings
    calibration: Calibration | None

    def budget(self, costs: CostTables) -> Budget:
        steps, settings = self.routing.steps, self.settings
        return parse_slots(settings.slots, settings.scope, steps.num_experts, costs.expert_bytes)

    def device_slots(self, costs: CostTables) -> int:
        """Slots that it needs on the device."""
        budget = self.budget(costs)
        known = (
            self.routing.steps,
            costs,
            self.composition,
            budget,
            self.settings,
            self.calibration,
        )
        return device_slots(assemble(*known), costs, budget, self.settings.staging_slots)


def validate(
    trace: Trace,
    plan: Plan,
    profile: Profile,
    runtime: Runtime,
    pace: Pace,
    settings: Settings,
    *,
    kind: Kind = EMULATED,
    calibration: str | None = None,
    geometry: ModelGeometry | None = None,
    gated: bool = True,
) -> dict[str, Any]:
    """The report (see DESIGN §8, `oled.validate.judge` and, of real devices, `devices`).

    Lanes that keep the times of `geometry`'s experts compute with the trace's own, a device with
    experts of that size. Not `gated`: decisions and outputs alone decide on the verdict.
    """
    began = time.perf_counter()
    subject = Subject.of(trace)
    configurations = _configurations(trace, subject, plan, settings, calibration)
    routing = configurations[0].routing
    steps = routing.steps
    form = form_of(trace.geometry, None if kind.keeps_time else geometry)
    numbers = NUMBERS[kind.numbers[0]]
    size = form.size * numbers.bytes  # that the live side moves, whatever the trace counts
    own = replace(trace.geometry, expert_bytes=(size,) * steps.num_layers)
    costs = pace.of(
        build_costs(
            own,
            steps.tokens,
            steps.context,
            int(steps.tokens.max()),
            profile,
            runtime,
            geometry,
            kernel=settings.cpu_kernel,
            pinned=settings.pinned,
        )
    )
    resident = _resident(kind, configurations, costs, size)
    filling = partial(tqdm, desc="random experts", unit="expert", disable=None)
    store = HostStore.random(form, steps.num_experts, settings.seed, numbers, filling)
    with kind.held(store):
        pairs = run_pairs(store, costs, configurations, plan, resident, kind=kind, paced=pace.kept)
    strangers = [] if kind.keeps_time else list(foreign(profile, kind.machine))
    gated = gated and pace.kept and not strangers
    return {
        **_judged([row(pair, steps) for pair in pairs], kind, gated),
        "backend": kind.name,
        "resident_share": resident.settings.slots,
        "paced": pace.kept,
        "gated": gated,
        "dilation": pace.dilation,
        "forwards": steps.num_forwards,
        "layer_steps": steps.num_steps,
        "trace": subject.name,
        "batch_size": settings.batch_size,
        "trace_hash": subject.hash,
        "hardware": profile.name,
        "runtime": runtime.name,
        "costs": dict(costs.provenance),
        "labels": [*costs.labels, *strangers],
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "wall_s": time.perf_counter() - began,
    }


def _configurations(
    trace: Trace, plain: Subject, plan: Plan, settings: Settings, calibration: str | None
) -> list[Configuration]:
    """Every policy with every number of slots; what cannot run is refused."""
    found = []
    routings: dict[str | None, Routing] = {}
    for policy in plan.policies:
        composition = load_composition(policy)
        refuse_unsupported(composition, settings)
        refuse_giving_up(composition)
        name = composition.predictor
        subject = plain if name is None else plain.predicting(name)
        refuse_what_is_missing(subject, composition)
        learned, _ = calibrate(subject, composition, calibration)
        if name not in routings:
            rows = settings.batch_size
            routings[name] = Routing.of(trace, subject.steps, 0, plan.forwards, rows)
        for slots in plan.slots:
            chosen = replace(settings, slots=slots, plans=True)
            found.append(Configuration(routings[name], composition, chosen, learned))
    return found


def _judged(rows: list[dict[str, Any]], kind: Kind, gated: bool) -> dict[str, Any]:
    """Definitions, figures and verdict, and the configurations that they come from."""
    told = DEFINITIONS.splitlines()
    if kind.keeps_time:
        return {"definitions": told, **judge(rows, gated=gated), "configurations": rows}
    told += definitions(kind.tolerance).splitlines()
    return {"definitions": told, **judge_device(rows, gated=gated), "configurations": rows}


def _resident(
    kind: Kind, configurations: Sequence[Configuration], costs: CostTables, size: int
) -> Configuration:
    """The run that all outputs are compared with: every expert has its slot, or as many as fit.

    What does not fit is refused before anything is allocated. `size`: of an expert, bytes.
    """
    routing = configurations[0].routing
    experts = int(routing.steps.num_experts.sum())
    settings = replace(configurations[0].settings, slots=1.0, scope="layer", staging=1)
    most = max(chosen.device_slots(costs) for chosen in configurations)
    free = kind.device_free()
    if free is None:
        most = max(most, experts + 1)
    elif (experts + 1) * size > free - _ROOM_TO_WORK:
        fitting = (free - _ROOM_TO_WORK) // size - _STREAMED
        share = max(0.0, fitting / experts)
        settings = replace(settings, slots=float(np.floor(1000 * share) / 1000), staging=_STREAMED)
    kind.preflight(experts * size, most * size).check()
    return Configuration(routing, RESIDENT, settings, None)


def run_pairs(
    store: HostStore,
    costs: CostTables,
    configurations: Sequence[Configuration],
    plan: Plan,
    resident: Configuration,
    *,
    kind: Kind = EMULATED,
    paced: bool,
) -> list[Pair]:
    """Every configuration live, as often as it needs, and simulated once.

    `resident`: what all outputs are compared with.
    """
    live = partial(_live, store, costs, kind)
    outputs = live(resident, False).outputs
    runs: list[list[LiveReplay]] = [[] for _ in configurations]
    errors = [0.0] * len(configurations)
    same = [True] * len(configurations)

    for chosen in configurations:  # everything is loaded before time counts
        live(chosen, False)

    def one_more(index: int) -> None:
        done = live(configurations[index], paced)
        error = done.outputs.error(outputs)
        errors[index] = max(errors[index], error)
        same[index] &= error <= kind.tolerance if kind.tolerance else done.outputs == outputs
        runs[index].append(replace(done, outputs=Outputs([])))

    deadline = time.perf_counter() + plan.budget_s
    for repeat in range(plan.repeats):
        log.info("live runs, repeat %d of %d", repeat + 1, plan.repeats)
        for index in range(len(configurations)):
            one_more(index)
    while time.perf_counter() < deadline:
        disturbed = [index for index, repeats in enumerate(runs) if _is_busy(repeats)]
        if not disturbed:
            break
        log.info("%d configurations were disturbed, once more", len(disturbed))
        for index in disturbed:
            if time.perf_counter() < deadline:
                one_more(index)
    pairs = []
    for chosen, repeats, error, identical in zip(configurations, runs, errors, same, strict=True):
        known = costs if paced else _deciding_as_measured(costs, chosen.routing.steps, repeats)
        pairs.append(_pair(known, chosen, repeats, error, identical))
    return pairs


def _deciding_as_measured(
    costs: CostTables, steps: Steps, runs: Sequence[LiveReplay]
) -> CostTables:
    """Where no times are kept, the clock charges for a decision what the live runs took."""
    forward_ns = float(np.median([run.decide_ns for run in runs]))
    return replace(costs, policy_ns=round(forward_ns * steps.num_forwards / steps.num_steps))


def _live(
    store: HostStore,
    costs: CostTables,
    kind: Kind,
    chosen: Configuration,
    paced: bool,
) -> LiveReplay:
    return live_replay(
        chosen.routing,
        store,
        costs,
        chosen.composition,
        chosen.budget(costs),
        chosen.settings,
        chosen.calibration,
        kind=kind,
        paced=paced,
    )


def _pair(
    costs: CostTables,
    chosen: Configuration,
    runs: Sequence[LiveReplay],
    outputs_error: float,
    outputs_identical: bool,
) -> Pair:
    steps, budget = chosen.routing.steps, chosen.budget(costs)
    settings = replace(chosen.settings, timeline=(0, steps.num_forwards))
    known = (steps, costs, chosen.composition, budget, settings, chosen.calibration)
    replay = replay_steps(*known)
    simulated = PlanLog(replay.tally.plans, replay.tally.orders)
    differences = (
        difference(run.plans, run.link, steps, simulated, assemble(*known)) for run in runs
    )
    entries = replay.lanes.log[: replay.lanes.logged[0]]
    return Pair(
        policy=chosen.composition.name,
        slots=chosen.settings.slots,
        live_ns=np.stack([run.end_ns - run.begin_ns for run in runs]),
        late_ns=np.stack([run.late_ns for run in runs]),
        live_work_ns=np.stack([run.work_ns for run in runs]),
        simulated_ns=replay.tally.end_ns - replay.tally.begin_ns,
        simulated_work_ns=work_ns(entries, steps.num_forwards),
        first_difference=next(filter(None, differences), None),
        decided_alike=float(np.median([equal_share(run.plans, simulated, steps) for run in runs])),
        outputs_identical=outputs_identical,
        outputs_error=outputs_error,
        decide_ns=float(np.median([run.decide_ns for run in runs])),
    )


def _is_busy(runs: Sequence[LiveReplay]) -> bool:
    return is_busy(
        np.stack([run.end_ns - run.begin_ns for run in runs]),
        np.stack([run.late_ns for run in runs]),
    )


def work_ns(entries: NDArray[np.int64], forwards: int) -> NDArray[np.int64]:
    """What each lane did for experts in each forward, i64[F, 4], from a simulated timeline."""
    work = np.zeros((forwards, len(LANES)), np.int64)
    for kind, lane in _LANE_OF.items():
        mine = entries[entries[:, 0] == kind]
        np.add.at(work[:, lane], mine[:, 3], mine[:, 2] - mine[:, 1])
    return work
