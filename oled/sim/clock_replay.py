"""Decide once, clock again: the decisions of one replay on other machines.

A machine-independent composition (see `oled.policies.composition`) decides the same whatever copies
and experts cost. Its first replay writes the plan log; the clock replays the log for every other
profile, bandwidth or runtime, and gives the same bytes as deciding anew would.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit
from oled.hardware.costs import CostTables
from oled.policies.composition import Composition
from oled.policies.decide import decides
from oled.policies.interface import (
    N_CPU,
    N_EVICTED_ACTIVE,
    N_TRANSFERS,
    ON_CPU,
    Cache,
    Costs,
    Plan,
    Queue,
    Rules,
    Step,
)
from oled.sim.calibration import Calibration
from oled.sim.clock import run_dense, run_head, run_layer, run_policy
from oled.sim.lanes import NOW, Lanes
from oled.sim.prepare import Assembly, Replay, assemble, replay_steps
from oled.sim.replay import Options, Workload, step_of
from oled.sim.serial import run_layer_serially
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.sim.tally import (
    BUSY_CPU,
    FORWARDS,
    L_TIME,
    LATE_BYTES,
    MOVED_BYTES,
    STALL_COPY,
    TIME,
    Tally,
    book_lanes,
)
from oled.trace.steps import Steps

ROOM_BYTES = 96 << 20


class Log(NamedTuple):
    """What was decided, as far as the clock needs it."""

    plans: NDArray[np.uint8]  # [N] as in `Tally`
    orders: NDArray[np.int16]  # [N] as in `Tally`
    slots: NDArray[np.int32]  # [S, 2] as in `Tally`


@bare_njit
def recall(step: Step, first: int, log: Log, plan: Plan) -> int:
    """Fill `plan` as it was decided; returns the slots that copies may take at once."""
    transfers, on_cpu = 0, 0
    for i in range(step.expert.size):
        entry = log.plans[first + i]
        plan.state[i], plan.place[i], plan.stays[i] = entry & 3, entry >> 2 & 3, entry >> 4
        on_cpu += int(plan.place[i] == ON_CPU)
        if log.orders[first + i] >= 0:
            plan.order[log.orders[first + i]] = i
            transfers += 1
    plan.count[N_TRANSFERS], plan.count[N_CPU] = transfers, on_cpu
    plan.count[N_EVICTED_ACTIVE] = log.slots[step.index, 1]
    return int(log.slots[step.index, 0])


def clock(
    log: Log,
    work: Workload,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    queue: Queue,
    lanes: Lanes,
    rules: Rules,
    options: Options,
    tally: Tally,
) -> None:
    """`oled.sim.replay.replay` with every decision read from the log; nothing is fetched ahead."""
    for forward in range(work.request.size):
        begin = lanes.t[NOW]
        for index in range(work.step_offsets[forward], work.step_offsets[forward + 1]):
            layer_begin = lanes.t[NOW]
            step = step_of(work, index, forward)
            run_dense(lanes, work.dense_ns[index], step, cache, costs, queue, rules)
            slots = recall(step, work.offsets[index], log, plan)
            if decides(step, rules):
                run_policy(lanes, step, cache, costs, queue, rules)
            if options.overlap:
                run_layer(lanes, step, plan, cache, costs, queue, rules, slots)
            else:
                run_layer_serially(lanes, step, plan, cache, costs, slots, False)
            tally.by_layer[step.layer, L_TIME] += lanes.t[NOW] - layer_begin
        routed = work.step_offsets[forward + 1] - 1
        run_head(lanes, work.head_ns[forward], forward, routed, cache, costs, queue, rules)
        tally.begin_ns[forward], tally.end_ns[forward] = begin, lanes.t[NOW]
        row = tally.by_phase[work.request[forward], work.phase[forward]]
        book_lanes(lanes, tally.before, row, lanes.t[NOW] - begin)


@functools.cache
def _compiled(signature: tuple[Any, ...]) -> Callable[..., None]:
    compiled: Callable[..., None] = bare_njit(types.void(*signature))(clock)
    return compiled


class Decisions:
    """The decisions made last on one trace, in at most `room_bytes`; the oldest are forgotten."""

    def __init__(self, room_bytes: int = ROOM_BYTES) -> None:
        self._room = room_bytes
        self._known: OrderedDict[str, tuple[Log, Replay]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def replay(
        self,
        steps: Steps,
        costs: CostTables,
        composition: Composition,
        budget: Budget,
        settings: Settings,
        calibration: Calibration | None = None,
    ) -> Replay:
        """What `replay_steps` gives; decisions that were made before are clocked again."""
        if not repeatable(composition) or settings.timeline is not None or settings.plans:
            return replay_steps(steps, costs, composition, budget, settings, calibration)
        key = _key(costs, composition, budget, settings, calibration)
        if key in self._known:
            self._known.move_to_end(key)
            ready = assemble(steps, costs, composition, budget, settings, calibration)
            return _clock_again(*self._known[key], ready)
        logging = dataclasses.replace(settings, plans=True)
        done = replay_steps(steps, costs, composition, budget, logging, calibration)
        tally = done.tally
        log = Log(tally.plans, tally.orders.astype(np.int16), tally.slots)
        empty = tally._replace(plans=tally.plans[:0], orders=tally.orders[:0], slots=log.slots[:0])
        self._known[key] = log, dataclasses.replace(done, tally=empty)
        while self._bytes() > self._room:
            self._known.popitem(last=False)
        return dataclasses.replace(done, tally=empty)

    def _bytes(self) -> int:
        return sum(array.nbytes for log, _ in self._known.values() for array in log)


def repeatable(composition: Composition) -> bool:
    """Whether its log is all that the clock needs; which experts are written back is not in it."""
    return composition.machine_independent and not composition.writes_back


def _key(
    costs: CostTables,
    composition: Composition,
    budget: Budget,
    settings: Settings,
    calibration: Calibration | None,
) -> str:
    """Of everything that decisions depend on."""
    known = (
        [type(part) for part in composition.parts],
        dataclasses.asdict(composition),
        budget.capacity.tolist(),
        budget.total_bytes,
        costs.expert_bytes.tolist(),
        dataclasses.replace(settings, geometry=None, cpu_kernel="tuned", pinned=True),
    )
    digest = hashlib.sha256(repr(known).encode())
    if calibration is not None:
        digest.update(calibration.prior.tobytes())
    return digest.hexdigest()


_OF_THE_CLOCK = [
    *range(MOVED_BYTES, LATE_BYTES + 1),
    *range(STALL_COPY, BUSY_CPU + 1),
    FORWARDS,
    TIME,
]
"""The columns of `Tally.by_phase` that `book_lanes` writes."""


def _clock_again(log: Log, before: Replay, ready: Assembly) -> Replay:
    tally = ready.tally
    tally.by_phase[:] = before.tally.by_phase
    tally.by_phase[..., _OF_THE_CLOCK] = 0
    tally.by_layer[:] = before.tally.by_layer
    tally.by_layer[:, L_TIME] = 0
    data = (
        log,
        ready.work,
        ready.cache,
        ready.costs,
        ready.plan,
        ready.queue,
        ready.lanes,
        ready.rules,
        ready.options,
        tally,
    )
    _compiled(tuple(numba.typeof(argument) for argument in data))(*data)
    return dataclasses.replace(before, tally=tally, lanes=ready.lanes)
