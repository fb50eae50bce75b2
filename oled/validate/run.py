"""Live runs and simulations of the same routing, configuration by configuration."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from oled.hardware import CostTables, Profile, Runtime
from oled.hardware.labels import foreign
from oled.hardware.this_machine import machine
from oled.live.backends.kind import Kind
from oled.live.backends.kinds import EMULATED
from oled.live.executor import refuse_giving_up, refuse_unsupported
from oled.live.routing import Routing, costs_of, form_of
from oled.live.store import NUMBERS
from oled.models.catalogue import ModelGeometry
from oled.policies.composition import Composition, load_composition
from oled.sim.api import calibrate, refuse_what_is_missing
from oled.sim.prepared import PreparedTrace
from oled.sim.settings import Settings
from oled.trace import Trace
from oled.validate.devices import GOALS, definitions, judge_device
from oled.validate.judge import DEFINITIONS, judge, row
from oled.validate.other_load import CpuTimes
from oled.validate.pace import Pace
from oled.validate.pairs import Configuration, Plan, run_pairs

log = logging.getLogger("oled")

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


def validate(
    trace: Trace,
    plan: Plan,
    profile: Profile,
    runtime: Runtime,
    pace: Pace,
    settings: Settings,
    *,
    kind: Kind[Any] = EMULATED,
    calibration: str | None = None,
    geometry: ModelGeometry | None = None,
    gated: bool = True,
) -> dict[str, Any]:
    """Return the report (see DESIGN §8, `oled.validate.judge` and, of real devices, `devices`).

    Lanes that keep the times of `geometry`'s experts compute with the trace's own, a device with
    experts of that size. Not `gated`: decisions and outputs alone decide on the verdict.
    """
    began = time.perf_counter()
    prepared = PreparedTrace.of(trace)
    configurations = _configurations(trace, prepared, plan, settings, calibration)
    for chosen in configurations:
        kind.refuse(chosen.composition)
    routing = configurations[0].routing
    steps = routing.steps
    form = form_of(trace.geometry, None if kind.keeps_time else geometry)
    geometry = kind.as_kept(geometry)
    numbers = NUMBERS[kind.numbers[0]]
    size = form.size * numbers.bytes  # that the live side moves, whatever the trace counts
    costs = pace.of(costs_of(routing, trace.geometry, size, settings, (profile, runtime), geometry))
    resident = _resident(kind, configurations, costs, size)
    filling = partial(tqdm, desc="random experts", unit="expert", disable=None)
    before = CpuTimes.now()
    store = kind.random(form, steps.num_experts, settings.seed, numbers, filling)
    with kind.held(store):
        pairs = run_pairs(store, costs, configurations, plan, resident, kind=kind, paced=pace.kept)
    after = CpuTimes.now()
    load = None if before is None or after is None else after.since(before)
    strangers = [] if kind.keeps_time else list(foreign(profile, kind.machine))
    gated = gated and pace.kept and not strangers
    return {
        **_judged([row(pair, steps) for pair in pairs], kind, gated, load),
        "backend": kind.name,
        "link": "memory" if kind.expert_file is None else "storage",
        "resident_share": resident.settings.slots,
        "paced": pace.kept,
        "gated": gated,
        "dilation": pace.dilation,
        "forwards": steps.num_forwards,
        "layer_steps": steps.num_steps,
        "trace": prepared.name,
        "batch_size": settings.batch_size,
        "trace_hash": prepared.hash,
        "hardware": profile.name,
        "runtime": runtime.name,
        "costs": dict(costs.provenance),
        "labels": [*costs.labels, *strangers],
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "wall_s": time.perf_counter() - began,
    }


def _configurations(
    trace: Trace, plain: PreparedTrace, plan: Plan, settings: Settings, calibration: str | None
) -> list[Configuration]:
    """Return every policy with every number of slots. Raises UserError for what cannot run."""
    found = []
    routings: dict[str | None, Routing] = {}
    for policy in plan.policies:
        composition = load_composition(policy)
        refuse_unsupported(composition, settings)
        refuse_giving_up(composition)
        name = composition.predictor
        prepared = plain if name is None else plain.predicting(name)
        refuse_what_is_missing(prepared, composition)
        learned, _ = calibrate(prepared, composition, calibration)
        if name not in routings:
            rows = settings.batch_size
            routings[name] = Routing.of(trace, prepared.steps, 0, plan.forwards, rows)
        for slots in plan.slots:
            chosen = replace(settings, slots=slots, plans=True)
            found.append(Configuration(routings[name], composition, chosen, learned))
    return found


def _judged(
    rows: list[dict[str, Any]], kind: Kind[Any], gated: bool, load: dict[str, float] | None
) -> dict[str, Any]:
    """Return definitions, figures and verdict, and the configurations that they come from."""
    words = DEFINITIONS.splitlines()
    if kind.keeps_time:
        return {"definitions": words, **judge(rows, gated=gated), "configurations": rows}
    goals = GOALS[kind.name]
    words += definitions(kind.tolerance, goals).splitlines()
    verdict = judge_device(rows, gated=gated, goals=goals, load=load)
    return {"definitions": words, **verdict, "configurations": rows}


def _resident(
    kind: Kind[Any], configurations: Sequence[Configuration], costs: CostTables, size: int
) -> Configuration:
    """Return the run to compare all outputs with: every expert (or as many as fit) has a slot.

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
