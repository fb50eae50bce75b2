"""`oled run trace=…`: a trace's routing live, with random weights of its own or another size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from oled.hardware import CostTables, Profile, Runtime
from oled.live.backends.kind import Kind
from oled.live.backends.kinds import EMULATED
from oled.live.executor import device_slots, refuse_giving_up, refuse_unsupported
from oled.live.link_replay import difference
from oled.live.planlog import PlanLog
from oled.live.replay import LiveReplay, live_replay
from oled.live.routing import Routing, costs_of, form_of
from oled.live.store import NUMBERS, Preflight
from oled.live.timeline import live_timeline
from oled.models.catalogue import ModelGeometry
from oled.paths import trace_path
from oled.policies.composition import Composition
from oled.sim.api import calibrate, refuse_what_is_missing, rows_of_groups
from oled.sim.calibration import Calibration
from oled.sim.metrics import headline, tpot_ns
from oled.sim.prepare import Replay, assemble, replay_steps
from oled.sim.prepared import PreparedTrace
from oled.sim.settings import Settings
from oled.sim.slots import Budget, parse_slots
from oled.sim.timeline import Timeline, write_events
from oled.trace import load
from oled.trace.steps import Steps


@dataclass(frozen=True, slots=True, eq=False)
class TraceRun:
    """Both sides of one configuration."""

    steps: Steps
    live: LiveReplay
    simulated: Replay
    layers: tuple[int, ...]
    paced: bool
    difference: str | None  # where the decisions part
    rows: dict[int, int]  # requests in lockstep, of each group
    preflight: Preflight

    def summary(self) -> dict[str, Any]:
        """Flat figures. Simulated times mean something beside live ones only where paced."""
        tally = self.simulated.tally
        counts: Mapping[str, Any] = headline(tally.by_phase)
        return {
            "forwards": self.steps.num_forwards,
            "layer_steps": self.steps.num_steps,
            "live_tpot_ns": tpot_ns(self.live.end_ns - self.live.begin_ns, self.steps, self.rows),
            "simulated_tpot_ns": tpot_ns(tally.end_ns - tally.begin_ns, self.steps, self.rows),
            "paced": self.paced,
            "worst_lateness_ns": int(self.live.late_ns.max()),
            "decide_ns_per_forward": float(np.median(self.live.decide_ns)),
            "decisions_identical": self.difference is None,
            "hit_rate": counts["hit_rate"],
            "transfers": counts["transfers"],
            "cpu_executions": counts["cpu_executions"],
        }

    def lines(self) -> list[str]:
        """The same in words."""
        found = self.summary()
        times = [found["live_tpot_ns"], found["simulated_tpot_ns"]]
        live, simulated = ("-" if time is None else f"{time / 1e6:.2f} ms" for time in times)
        return [
            str(self.preflight),
            f"{found['forwards']} forwards, {found['layer_steps']} layer-steps: TPOT live {live}, "
            f"simulated {simulated}" + ("" if self.paced else " (no times kept: paced=false)"),
            f"hit rate {found['hit_rate'] or 0:.1%}, {found['transfers']} transfers, "
            f"{found['cpu_executions']} on the CPU; deciding "
            f"{found['decide_ns_per_forward'] / 1e3:.0f} us a forward",
            f"worst lateness of a lane {found['worst_lateness_ns'] / 1e3:.0f} us",
            "decisions: the simulator's" if self.difference is None else self.difference,
        ]

    def write_timeline(self, file: Path, name: str) -> Path:
        """Both sides in one file that Perfetto opens."""
        simulated = Timeline.of(self.simulated.lanes, self.layers, name)
        live = live_timeline(self.live.entries, self.layers, name)
        return write_events(file, [*simulated.events(1), *live.events(2)])


def run_trace(
    source: str | Path,
    composition: Composition,
    settings: Settings,
    profile: Profile,
    runtime: Runtime,
    geometry: ModelGeometry | None = None,
    *,
    kind: Kind[Any] = EMULATED,
    paced: bool = False,
    forwards: int | None = None,
    calibration: str | None = None,
) -> TraceRun:
    """Run it live and simulate it. `geometry`: experts and times of that model's size.

    Weights are random, in the numbers that the backend likes best.
    """
    refuse_unsupported(composition, settings)
    refuse_giving_up(composition)
    kind.refuse(composition)
    trace = load(trace_path(source))
    subject = PreparedTrace.of(trace)
    if composition.predictor is not None:
        subject = subject.predicting(composition.predictor)
    refuse_what_is_missing(subject, composition)
    learned, _ = calibrate(subject, composition, calibration)
    most = subject.steps.num_forwards
    routing = Routing.of(trace, subject.steps, 0, forwards or most, settings.batch_size)
    steps = routing.steps
    form = form_of(trace.geometry, geometry)
    geometry = kind.as_kept(geometry)
    numbers = NUMBERS[kind.numbers[0]]
    size = form.size * numbers.bytes
    costs = costs_of(routing, trace.geometry, size, settings, (profile, runtime), geometry)
    budget = parse_slots(settings.slots, settings.scope, steps.num_experts, costs.expert_bytes)
    ready = assemble(steps, costs, composition, budget, settings, learned)
    slots = device_slots(ready, costs, budget, settings.staging_slots)
    preflight = kind.preflight(int(steps.num_experts.sum()) * size, slots * size)
    preflight.check()
    filling = partial(tqdm, desc="random experts", unit="expert", disable=None)
    store = kind.random(form, steps.num_experts, settings.seed, numbers, filling)
    live = live_replay(
        routing, store, costs, composition, budget, settings, learned,
        kind=kind, paced=paced, keep_outputs=False,
    )  # fmt: skip
    simulated, parted = _simulated(live, (steps, costs, composition, budget), settings, learned)
    rows = rows_of_groups(subject.steps, settings.batch_size)
    return TraceRun(
        steps, live, simulated, trace.geometry.moe_layers, paced, parted, rows, preflight
    )


def _simulated(
    live: LiveReplay,
    subject: tuple[Steps, CostTables, Composition, Budget],
    settings: Settings,
    learned: Calibration | None,
) -> tuple[Replay, str | None]:
    """Return the simulation of the same routing, and where its decisions part from the run's."""
    steps = subject[0]
    known = (*subject, replace(settings, plans=True, timeline=(0, steps.num_forwards)), learned)
    simulated = replay_steps(*known)
    plans = PlanLog(simulated.tally.plans, simulated.tally.orders)
    return simulated, difference(live.plans, live.link, steps, plans, assemble(*known))
