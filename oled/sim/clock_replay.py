"""Decide once, clock again: the decisions of one replay on other machines.

A machine-independent composition (see `oled.policies.composition`) decides the same whatever copies
and experts cost. Its first replay writes the plan log; the clock replays the log for every other
profile, bandwidth or runtime, and gives the same bytes as deciding anew would.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict

import numpy as np

from oled.hardware.costs import CostTables
from oled.policies.composition import Composition
from oled.sim.calibration import Calibration
from oled.sim.prepare import Assembly, Replay, assemble, replay_steps
from oled.sim.replay import Log, run
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
)
from oled.trace.steps import Steps

ROOM_BYTES = 96 << 20


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
    run(None, log, ready.lanes, ready.state)
    return dataclasses.replace(before, tally=tally, lanes=ready.lanes)
