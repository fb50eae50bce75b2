"""Each configuration live and simulated, beside one another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.hardware import CostTables
from oled.live.backends.kind import Kind
from oled.live.backends.kinds import EMULATED
from oled.live.executor import device_slots
from oled.live.link_replay import difference
from oled.live.outputs import Outputs
from oled.live.planlog import PlanLog, equal_share
from oled.live.replay import LiveReplay, live_replay
from oled.live.routing import Routing
from oled.live.store import Store
from oled.policies.composition import Composition
from oled.sim import lanes as ln
from oled.sim.calibration import Calibration
from oled.sim.prepare import assemble, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import Budget, parse_slots
from oled.trace.steps import Steps
from oled.validate.judge import LANES, Pair, is_busy

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


@dataclass(frozen=True, slots=True)
class Plan:
    """The configurations to run, on how many forwards, and how often."""

    policies: tuple[str | Composition, ...]
    slots: tuple[int | float | str, ...]
    forwards: int  # from the first one on
    repeats: int = 3
    budget_s: float = 0.0  # while less has passed, disturbed configurations are run again


@dataclass(frozen=True, slots=True)
class Configuration:
    """One policy with one cache, ready to run."""

    routing: Routing  # with the predictions of the policy's predictor
    composition: Composition
    settings: Settings
    calibration: Calibration | None

    def budget(self, costs: CostTables) -> Budget:
        steps, settings = self.routing.steps, self.settings
        return parse_slots(settings.slots, settings.scope, steps.num_experts, costs.expert_bytes)

    def device_slots(self, costs: CostTables) -> int:
        """Return how many slots it needs on the device."""
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


def run_pairs(
    store: Store,
    costs: CostTables,
    configurations: Sequence[Configuration],
    plan: Plan,
    resident: Configuration,
    *,
    kind: Kind[Any] = EMULATED,
    paced: bool,
) -> list[Pair]:
    """Run every configuration live, as often as it needs, and simulate it once.

    `resident`: what all outputs are compared with.
    """
    live = partial(_live, store, costs, kind)
    runs = _Runs(configurations, live(resident, False).outputs, kind.tolerance, live, paced)
    for chosen in configurations:  # everything is loaded before time counts
        live(chosen, False)
    deadline = time.perf_counter() + plan.budget_s
    every = range(len(configurations))
    for repeat in range(plan.repeats):
        log.info("live runs, repeat %d of %d", repeat + 1, plan.repeats)
        for index in every:
            runs.repeat(index)
    while time.perf_counter() < deadline:
        disturbed = [index for index in every if _is_busy(runs.done[index])]
        if not disturbed:
            break
        log.info("%d configurations were disturbed, once more", len(disturbed))
        for index in disturbed:
            if time.perf_counter() < deadline:
                runs.repeat(index)
    return [runs.pair(index, costs) for index in every]


class _Runs:
    """The live runs of every configuration, and how far their outputs are off."""

    def __init__(
        self,
        configurations: Sequence[Configuration],
        outputs: Outputs,
        tolerance: float,
        live: Callable[[Configuration, bool], LiveReplay],
        paced: bool,
    ) -> None:
        self.done: list[list[LiveReplay]] = [[] for _ in configurations]
        self._configurations, self._outputs, self._tolerance = configurations, outputs, tolerance
        self._live, self._paced = live, paced
        self._errors = [0.0] * len(configurations)
        self._same = [True] * len(configurations)

    def repeat(self, index: int) -> None:
        """Run a configuration once more and compare its outputs."""
        run = self._live(self._configurations[index], self._paced)
        error = run.outputs.error(self._outputs)
        self._errors[index] = max(self._errors[index], error)
        same = error <= self._tolerance if self._tolerance else run.outputs == self._outputs
        self._same[index] &= same
        self.done[index].append(replace(run, outputs=Outputs([])))

    def pair(self, index: int, costs: CostTables) -> Pair:
        """Simulate a configuration and put it beside its live runs."""
        chosen, done = self._configurations[index], self.done[index]
        if not self._paced:
            costs = _deciding_as_measured(costs, chosen.routing.steps, done)
        return _pair(costs, chosen, done, self._errors[index], self._same[index])


def _deciding_as_measured(
    costs: CostTables, steps: Steps, runs: Sequence[LiveReplay]
) -> CostTables:
    """Return costs that charge for a decision what the live runs took, which keep no times."""
    forward_ns = float(np.median([run.decide_ns for run in runs]))
    return replace(costs, policy_ns=round(forward_ns * steps.num_forwards / steps.num_steps))


def _live(
    store: Store,
    costs: CostTables,
    kind: Kind[Any],
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
    entries = replay.lanes.log[: replay.lanes.entries]
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
    """Return each lane's work for experts in each forward, i64[F, 4], from a simulated timeline."""
    work = np.zeros((forwards, len(LANES)), np.int64)
    for kind, lane in _LANE_OF.items():
        mine = entries[entries[:, 0] == kind]
        np.add.at(work[:, lane], mine[:, 3], mine[:, 2] - mine[:, 1])
    return work
