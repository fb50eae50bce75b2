"""The routing of a trace run live: random or real weights, random inputs, every layer-step real.

Dense parts and heads take their nominal time and compute nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.hardware import CostTables
from oled.live.backends import Backend
from oled.live.backends.kind import Kind
from oled.live.backends.kinds import EMULATED
from oled.live.decider import Decider
from oled.live.executor import (
    Executor,
    device_slots,
    refuse_giving_up,
    refuse_unsupported,
)
from oled.live.link_replay import forwards_of
from oled.live.outputs import Outputs
from oled.live.planlog import LinkLog, PlanLog
from oled.live.routing import Routing
from oled.live.store import Store
from oled.policies.composition import Composition
from oled.policies.interface import Step
from oled.sim.calibration import Calibration
from oled.sim.lanes import LOG_DENSE, LOG_HEAD
from oled.sim.prepare import assemble
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.sim.state import Workload, step_of

_SHIFTS = 64  # layer-steps before inputs repeat


@dataclass(frozen=True, slots=True, eq=False)
class LiveReplay:
    """The result of one live replay. F forwards, S layer-steps."""

    plans: PlanLog
    link: LinkLog
    outputs: Outputs
    begin_ns: NDArray[np.int64]  # [F] actual
    end_ns: NDArray[np.int64]  # [F]
    late_ns: NDArray[np.int64]  # [F] worst lateness of any lane against its own deadlines
    work_ns: NDArray[np.int64]  # [F, 4] nominal work given to GPU, H2D, D2H, CPU; experts only
    decide_ns: NDArray[np.int64]  # [F] wall time of deciding
    entries: NDArray[np.int64]  # timeline, as in oled.sim.timeline.Timeline


def live_replay(
    routing: Routing,
    store: Store,
    costs: CostTables,
    composition: Composition,
    budget: Budget,
    settings: Settings,
    calibration: Calibration | None = None,
    *,
    kind: Kind[Any] = EMULATED,
    paced: bool = True,
    keep_outputs: bool = True,
) -> LiveReplay:
    """Run `routing` on a backend, with random inputs.

    Outputs are kept where they are computed until the run is over.
    """
    refuse_unsupported(composition, settings)
    refuse_giving_up(composition)
    kind.refuse(composition)
    steps = routing.steps
    ready = assemble(steps, costs, composition, budget, settings, calibration)
    slots = device_slots(ready, costs, budget, settings.staging_slots)
    kind.preflight(0, slots * store.expert_bytes).check()
    backend = kind.make(store, slots, ready.costs, paced)
    executor = Executor(store, slots, Decider(ready), backend)
    inputs = _inputs(routing, ready.work, backend, store.form.hidden, settings.seed)
    with executor:
        outputs, times, work_ns = _forwards(executor, routing, inputs, keep_outputs)
        read = Outputs([backend.read(out) for out in outputs])
    return LiveReplay(
        plans=executor.decider.log(),
        link=executor.decider.link_log(),
        outputs=read,
        begin_ns=times[0],
        end_ns=times[1],
        late_ns=times[2],
        work_ns=work_ns,
        decide_ns=np.array(executor.decide_ns, np.int64),
        entries=np.array(backend.entries, np.int64).reshape(-1, 6),
    )


Input = tuple[Step, Any, Any]
"""A layer-step with its weights [T, k] and inputs [T, H], in the backend's form."""


def _forwards(
    executor: Executor, routing: Routing, inputs: Sequence[Input], keep_outputs: bool
) -> tuple[list[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Run all forwards; return outputs, (begin, end, worst lateness) [3, F] and work [F, 4], ns."""
    ready, backend = executor.decider.ready, executor.backend
    work, forwards = ready.work, routing.steps.num_forwards
    outputs: list[Any] = []
    times, work_ns = np.zeros((3, forwards), np.int64), np.zeros((forwards, 4), np.int64)
    for at, resets in forwards_of(work, ready.options.persistent):
        forward = at.forward
        if resets:
            executor.begin_request()
        times[0, forward] = backend.now
        executor.begin_forward(at)
        for index in range(work.step_offsets[forward], work.step_offsets[forward + 1]):
            step, weight, x = inputs[index]
            backend.host(LOG_DENSE, int(work.dense_ns[index]), forward, step.layer)
            out = executor.run(step, ready.side, routing.ids[index], weight, x)
            if keep_outputs:
                outputs.append(out)
        backend.host(LOG_HEAD, int(work.head_ns[forward]), forward, -1)
        times[1, forward] = backend.now
        times[2, forward], work_ns[forward] = backend.take()
    return outputs, times, work_ns


def _inputs(
    routing: Routing, work: Workload, backend: Backend, hidden: int, seed: int
) -> list[Input]:
    """Return every layer-step with its weights and random inputs."""
    rng = np.random.default_rng(seed)
    shape = (max(map(len, routing.ids)) + _SHIFTS, hidden)
    bank = backend.adopt(rng.standard_normal(shape, dtype=np.float32))
    found = []
    for index, (forward, weight) in enumerate(
        zip(routing.steps.forward, routing.weights, strict=True)
    ):
        row = index % _SHIFTS
        x = bank[row : row + len(weight)]
        found.append((step_of(work, index, int(forward)), backend.adopt(weight), x))
    return found
