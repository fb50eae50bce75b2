"""Live runs and simulations of the same routing, configuration by configuration."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.hardware import CostTables, Profile, Runtime, build_costs
from oled.live.executor import refuse_unsupported
from oled.live.given import difference
from oled.live.machine import machine
from oled.live.outputs import Outputs
from oled.live.planlog import PlanLog, equal_share
from oled.live.replay import LiveReplay, Routing, form_of, live_replay
from oled.live.store import HostStore
from oled.models.catalogue import ModelGeometry
from oled.policies.composition import Composition, load_composition
from oled.sim import lanes as ln
from oled.sim.api import calibrate
from oled.sim.calibration import Calibration
from oled.sim.prepare import assemble, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import parse_slots
from oled.sim.subject import Subject
from oled.trace import Trace
from oled.validate.judge import LANES, Pair, is_busy, judge, row
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

    composition: Composition
    settings: Settings
    calibration: Calibration | None


def validate(
    trace: Trace,
    plan: Plan,
    profile: Profile,
    runtime: Runtime,
    pace: Pace,
    settings: Settings,
    *,
    calibration: str | None = None,
    geometry: ModelGeometry | None = None,
) -> dict[str, Any]:
    """The report (see DESIGN §8 and `oled.validate.judge`)."""
    began = time.perf_counter()
    subject = Subject.of(trace)
    configurations = []
    for policy in plan.policies:
        composition = load_composition(policy)
        refuse_unsupported(composition, settings)
        learned, _ = calibrate(subject, composition, calibration)
        for slots in plan.slots:
            chosen = replace(settings, slots=slots, plans=True)
            configurations.append(Configuration(composition, chosen, learned))
    routing = Routing.of(trace, 0, plan.forwards)
    steps = routing.steps
    store = HostStore.random(form_of(trace.geometry), steps.num_experts, settings.seed)
    size = store.form.size * 4  # the live side moves float32, whatever the trace counts
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
    pairs = run_pairs(routing, store, costs, configurations, plan, paced=pace.kept)
    rows = [row(pair, steps) for pair in pairs]
    return {
        **judge(rows, gated=pace.kept),
        "configurations": rows,
        "backend": "emulated",
        "paced": pace.kept,
        "dilation": pace.dilation,
        "forwards": steps.num_forwards,
        "layer_steps": steps.num_steps,
        "trace": subject.name,
        "trace_hash": subject.hash,
        "hardware": profile.name,
        "runtime": runtime.name,
        "costs": dict(costs.provenance),
        "labels": list(costs.labels),
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "wall_s": time.perf_counter() - began,
    }


def run_pairs(
    routing: Routing,
    store: HostStore,
    costs: CostTables,
    configurations: Sequence[Configuration],
    plan: Plan,
    *,
    paced: bool,
) -> list[Pair]:
    """Every configuration live, as often as it needs, and simulated once."""
    resident = replace(configurations[0].settings, slots=1.0, scope="layer", staging=1)
    outputs = _live(routing, store, costs, Configuration(RESIDENT, resident, None), False).outputs
    runs: list[list[LiveReplay]] = [[] for _ in configurations]

    def one_more(index: int) -> None:
        runs[index].append(_live(routing, store, costs, configurations[index], paced))

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
    return [
        _pair(routing, costs, chosen, repeats, outputs)
        for chosen, repeats in zip(configurations, runs, strict=True)
    ]


def _live(
    routing: Routing, store: HostStore, costs: CostTables, chosen: Configuration, paced: bool
) -> LiveReplay:
    budget = parse_slots(
        chosen.settings.slots,
        chosen.settings.scope,
        routing.steps.num_experts,
        costs.expert_bytes,
    )
    return live_replay(
        routing,
        store,
        costs,
        chosen.composition,
        budget,
        chosen.settings,
        chosen.calibration,
        paced=paced,
    )


def _pair(
    routing: Routing,
    costs: CostTables,
    chosen: Configuration,
    runs: Sequence[LiveReplay],
    outputs: Outputs,
) -> Pair:
    steps = routing.steps
    budget = parse_slots(
        chosen.settings.slots, chosen.settings.scope, steps.num_experts, costs.expert_bytes
    )
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
        outputs_identical=all(run.outputs == outputs for run in runs),
        decide_ns=float(np.median([run.decide_ns for run in runs])) / steps.num_forwards,
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
