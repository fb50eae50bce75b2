"""The simulator's decisions, one layer-step at a time, with the simulator's own log of them.

Between two decisions the link takes from what the policy asked for and says what has crossed. That
goes through the simulator's functions, too, and is logged: it is the only way in which decisions
depend on time. A *turn* is one call of `begin_request`, `begin_forward`, `decide`, `ask` or
`finish`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit
from oled.live.planlog import BEGAN, CROSSED, LOOKED, LinkLog, PlanLog
from oled.policies.interface import (
    At,
    Cache,
    Costs,
    Queue,
    Rules,
    Side,
    Step,
)
from oled.sim.lanes import (
    LOG_USE,
    PPM,
    Lanes,
    end_chunk,
    take_prefetch,
)
from oled.sim.parts import PARTS
from oled.sim.prepare import Assembly
from oled.sim.replay import ask_ahead, decide_step
from oled.sim.requests import abandon, clear, fit_capacities, reset
from oled.sim.staging import clear_layer, settle_landed
from oled.sim.state import State


class Crossing(NamedTuple):
    """A piece of a copy made ahead."""

    layer: int
    expert: int
    piece: int  # 0 ..
    pieces: int  # of the whole copy
    work_ns: int  # nominal, on a link that is awake


NOT_LANDED = -(2**62)  # of `_cross`: more pieces are to come


@bare_njit
def _take(lanes: Lanes, queue: Queue, cache: Cache, costs: Costs, routed: int, room: int) -> int:
    lanes.link_ended = lanes.now  # waking the link is the backend's to add
    return int(take_prefetch(lanes, queue, cache, costs, routed, room))


@bare_njit
def _cross(lanes: Lanes, cache: Cache, routed: int, busy_layer: int, rules: Rules) -> int:
    if not end_chunk(lanes, cache, 0):
        return NOT_LANDED
    return int(settle_landed(lanes, routed, busy_layer, cache, rules))


@functools.cache
def _compiled() -> tuple[Callable[..., int], Callable[..., None]]:
    """Return `decide_step` and `ask_ahead` as machine code that takes its arguments as they are:
    numba would ask each for its type at every call, which takes longer than to decide.
    """
    deciding = (PARTS, Step.ref, Lanes.ref, State.ref, types.int64, types.int64)
    asking = (PARTS, Step.ref, Side.ref, State.ref)
    decide: Any = bare_njit(types.int64(*deciding))(decide_step)
    ask: Any = bare_njit(types.void(*asking))(ask_ahead)
    return decide.overloads[deciding].entry_point, ask.overloads[asking].entry_point


def prefetches(ready: Assembly) -> bool:
    """Whether anything is ever copied ahead."""
    return ready.prefetches


class Decider:
    """Decides for a live run. `ready` is what the simulator would replay with."""

    def __init__(self, ready: Assembly) -> None:
        self.ready = ready
        self.prefetches = prefetches(ready)
        experts = ready.cache.resident.shape[1]
        self.tally = ready.tally._replace(
            by_phase=np.zeros((1, *ready.tally.by_phase.shape[1:]), np.int64),
            plans=np.zeros(experts, np.uint8),
            orders=np.zeros(experts, np.int32),
        )
        self._lanes = ready.lanes._replace(log=np.zeros((experts, 6), np.int64))
        self._lanes.recording = True  # it gets first uses only
        self._state = ready.state._replace(tally=self.tally)
        self._parts, self._decide, self._ask = ready.parts, decide_step, ask_ahead
        if ready.parts.compiled:
            self._parts = ready.parts.opaque()
            self._decide, self._ask = _compiled()
        self._plans: list[NDArray[np.uint8]] = []
        self._orders: list[NDArray[np.int32]] = []
        self._link: list[tuple[int, int, int, int]] = []
        self._routed, self._busy_layer = -1, -1
        self._pieces = 0  # of the copy that is being made ahead
        self.turn = 0

    def begin_request(self) -> None:
        """Scores, residency and allocation start afresh; learned memory stays."""
        self.end_request()
        reset(self.ready.cache, self.ready.start)
        for cells in self.ready.parts.cells:
            clear(cells)
        self.turn += 1

    def end_request(self) -> None:
        """What was copied ahead and not used was copied in vain; the link must be idle."""
        abandon(self.ready.cache, self._lanes, self.ready.queue)

    def begin_forward(self, at: At) -> list[tuple[int, int]]:
        """Allocate slots; returns (layer, expert) of the residents that lost theirs."""
        ready = self.ready
        parts = ready.parts
        parts.allocate(at, ready.cache, parts.memory.allocation, parts.params.allocation)
        self.turn += 1
        if ready.rules.pooled:
            return []
        fit_capacities(ready.cache, ready.plan, self._lanes)
        return self.evicted()

    def decide(self, step: Step) -> int:
        """Fill `ready.plan`; returns the slots that copies may take at once."""
        self._lanes.entries = 0
        slots = self._decide(self._parts, step, self._lanes, self._state, 0, 0)
        active = step.expert.size
        self._plans.append(self.tally.plans[:active].copy())
        self._orders.append(self.tally.orders[:active].copy())
        self._routed, self._busy_layer = step.index, step.layer
        self.turn += 1
        return int(slots)

    def ask(self, step: Step, side: Side) -> None:
        """Fill the queue, when the policy's time for a decided layer-step is over."""
        self._ask(self._parts, step, side, self._state)
        self.turn += 1

    def finish(self, step: Step) -> None:
        """The layer-step has computed: what was staged for it leaves staging."""
        clear_layer(self._lanes, step, self.ready.plan, self.ready.cache, self.ready.rules)
        self._busy_layer = -1
        self.turn += 1

    def take(self, room: int) -> Crossing | None:
        """The next piece to copy ahead, into one of `room` slots where it is a copy's first."""
        ready, copying = self.ready, self._lanes.copying
        before = int(ready.queue.begin)
        taken = _take(self._lanes, ready.queue, ready.cache, ready.costs, self._routed, room)
        if taken < 0:
            if ready.queue.begin != before:
                self._link.append((self.turn, LOOKED, int(room > 0), 0))
            return None
        if taken > 0:
            self._pieces = int(copying.chunks)
        layer, expert = self.crossing
        self._link.append((self.turn, BEGAN, layer, expert))
        piece = self._pieces - int(copying.chunks)
        return Crossing(layer, expert, piece, self._pieces, int(self._lanes.link_left) // PPM)

    def crossed(self) -> int | None:
        """The piece has crossed. Returns None, or if the expert has landed with it the slots that
        the executing layer-step may take now in addition.
        """
        ready = self.ready
        self._link.append((self.turn, CROSSED, *self.crossing))
        freed = int(_cross(self._lanes, ready.cache, self._routed, self._busy_layer, ready.rules))
        return None if freed == NOT_LANDED else freed

    @property
    def crossing(self) -> tuple[int, int]:
        """(layer, expert) of the copy that is being made ahead, or was last."""
        copying = self._lanes.copying
        return int(copying.layer), int(copying.expert)

    def evicted(self) -> list[tuple[int, int]]:
        """(layer, expert) of the residents that the last decision took out."""
        experts = self.ready.cache.resident.shape[1]
        gone = self.ready.plan.evicted[: self.ready.plan.evictions]
        return [divmod(int(entry), experts) for entry in gone]

    def first_uses(self) -> list[int]:
        """Residents of the layer that were copied ahead and are used for the first time."""
        entries = self._lanes.log[: self._lanes.entries]
        return [int(item) for item in entries[entries[:, 0] == LOG_USE, 5]]

    def log(self) -> PlanLog:
        """Everything decided so far."""
        return PlanLog(
            np.concatenate([np.zeros(0, np.uint8), *self._plans]),
            np.concatenate([np.zeros(0, np.int32), *self._orders]),
        )

    def link_log(self) -> LinkLog:
        """Everything that the link did ahead, so far."""
        return np.array(self._link, np.int64).reshape(-1, 4)
