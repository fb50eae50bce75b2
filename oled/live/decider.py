"""The simulator's decisions, one layer-step at a time, with the simulator's own log of them.

Between two decisions the link takes from what the policy asked for and says what has crossed. That
goes through the simulator's functions, too, and is logged: it is the only way in which decisions
depend on time. A *turn* is one call of `begin_request`, `begin_forward`, `decide` or `finish`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit
from oled.live.planlog import BEGAN, CROSSED, LOOKED, LinkLog, PlanLog
from oled.policies import interface
from oled.policies.decide import decide, decides
from oled.policies.interface import (
    N_EVICTED,
    At,
    Cache,
    Costs,
    Kernel,
    Plan,
    Queue,
    Rules,
    Side,
    Step,
)
from oled.policies.part import ask_nothing
from oled.sim.lanes import (
    LINK_ENDED,
    LINK_LEFT,
    LOG_USE,
    NOW,
    P_CHUNKS,
    P_EXPERT,
    P_LAYER,
    PPM,
    Lanes,
    end_chunk,
    take_prefetch,
)
from oled.sim.prepare import Assembly
from oled.sim.replay import abandon, clear, fit_capacities, reset
from oled.sim.staging import clear_layer, settle_landed
from oled.sim.tally import Tally, count_step, write_plan


class Crossing(NamedTuple):
    """A piece of a copy made ahead."""

    layer: int
    expert: int
    piece: int  # 0 ..
    pieces: int  # of the whole copy
    work_ns: int  # nominal, on a link that is awake


def _decide_step(
    observe: Callable[..., None],
    watch: Callable[..., None],
    dispatch: Callable[..., None],
    ask: Callable[..., None],
    params: tuple[NDArray[np.float64], ...],
    memory: tuple[NDArray[np.float64], ...],
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    rules: Rules,
    lanes: Lanes,
    tally: Tally,
) -> int:
    """Decide, count and write down one layer-step, in the order of `oled.sim.replay.replay`."""
    slots: int = decide(observe, watch, dispatch, params, memory, step, cache, costs, plan, rules)
    count_step(step, cache, plan, lanes, tally, 0)
    write_plan(step, plan, tally, 0)
    if decides(step, rules):
        ask(step, cache, costs, plan, side, queue, memory[3], params[3])
    return slots


@bare_njit
def _take(lanes: Lanes, queue: Queue, cache: Cache, costs: Costs, routed: int, room: int) -> int:
    lanes.t[LINK_ENDED] = lanes.t[NOW]  # waking the link is the backend's to add
    return int(take_prefetch(lanes, queue, cache, costs, routed, room))


@bare_njit
def _cross(lanes: Lanes, cache: Cache, routed: int, busy_layer: int, rules: Rules) -> int:
    if not end_chunk(lanes, cache, 0):
        return -1
    return int(settle_landed(lanes, routed, busy_layer, cache, rules))


_SIGNATURES = (interface.OBSERVE, interface.WATCH, interface.DISPATCH, interface.ASK)


class _Pointer(types.WrapperAddressProtocol):  # type: ignore[misc]
    """A compiled part as its address: numba would look a dispatcher up anew at every call."""

    def __init__(self, dispatcher: Any, signature: Any) -> None:
        found = dispatcher.get_compile_result(signature)
        self._dispatcher = dispatcher  # owns the code
        self._signature = signature
        name = found.fndesc.llvm_cfunc_wrapper_name
        self._address = int(found.library.get_pointer_to_function(name))

    def __wrapper_address__(self) -> int:
        return self._address

    def signature(self) -> Any:
        return self._signature


@functools.cache
def _compiled(signature: tuple[Any, ...]) -> Callable[..., int]:
    """Machine code for arguments of exactly these types: numba would ask each for its type at every
    call, which takes longer than to decide.
    """
    typed = (*map(types.FunctionType, _SIGNATURES), *signature)
    compiled: Any = bare_njit(types.int64(*typed))(_decide_step)
    entry: Callable[..., int] = compiled.overloads[typed].entry_point
    return entry


def prefetches(ready: Assembly) -> bool:
    """Whether anything is ever copied ahead."""
    return ready.functions[4] is not ask_nothing


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
        self._lanes.logged[1] = 1  # it gets first uses only
        observe, watch, self._allocate, dispatch, ask = (
            part.compiled() if isinstance(part, Kernel) else part for part in ready.functions
        )
        self._deciders: list[Any] = [observe, watch, dispatch, ask]
        self._run: Callable[..., int] = _decide_step
        compiles = not numba.config.DISABLE_JIT
        if compiles and all(isinstance(part, Kernel) for part in ready.functions):
            typed = [numba.typeof(data) for data in self._data()]
            known = (*typed[:2], interface.STEP, *typed[2:5], interface.SIDE, *typed[5:])
            self._run = _compiled(known)
            self._deciders = [
                _Pointer(part, sig) for part, sig in zip(self._deciders, _SIGNATURES, strict=True)
            ]
        self._plans: list[NDArray[np.uint8]] = []
        self._orders: list[NDArray[np.int32]] = []
        self._link: list[tuple[int, int, int, int]] = []
        self._routed, self._busy_layer = -1, -1
        self._pieces = 0  # of the copy that is being made ahead
        self.turn = 0

    def _data(self) -> tuple[Any, ...]:
        """What `_decide_step` gets beside functions, step and side, in its order."""
        ready = self.ready
        return (
            ready.params,
            ready.memory,
            ready.cache,
            ready.costs,
            ready.plan,
            ready.queue,
            ready.rules,
            self._lanes,
            self.tally,
        )

    def begin_request(self) -> None:
        """Scores, residency and allocation start afresh; learned memory stays."""
        self.end_request()
        reset(self.ready.cache, self.ready.start)
        for memory, learned in zip(self.ready.memory, self.ready.learned, strict=True):
            if not learned:
                clear(memory)
        self.turn += 1

    def end_request(self) -> None:
        """What was copied ahead and not used was copied in vain; the link must be idle."""
        abandon(self.ready.cache, self._lanes, self.ready.queue)

    def begin_forward(self, at: At) -> list[tuple[int, int]]:
        """Allocate slots; returns (layer, expert) of the residents that lost theirs."""
        ready = self.ready
        self._allocate(at, ready.cache, ready.memory[1], ready.params[1])
        self.turn += 1
        if ready.rules.pooled:
            return []
        fit_capacities(ready.cache, ready.plan, self._lanes)
        return self.evicted()

    def decide(self, step: Step, side: Side) -> int:
        """Fill `ready.plan` and the queue; returns the slots that copies may take at once."""
        params, memory, cache, costs, plan, *rest = self._data()
        self._lanes.logged[0] = 0
        slots = self._run(*self._deciders, params, memory, step, cache, costs, plan, side, *rest)
        active = step.expert.size
        self._plans.append(self.tally.plans[:active].copy())
        self._orders.append(self.tally.orders[:active].copy())
        self._routed, self._busy_layer = step.index, step.layer
        self.turn += 1
        return int(slots)

    def finish(self, step: Step) -> None:
        """The layer-step has computed: what was staged for it leaves staging."""
        clear_layer(self._lanes, step, self.ready.plan, self.ready.cache, self.ready.rules)
        self._busy_layer = -1
        self.turn += 1

    def take(self, room: int) -> Crossing | None:
        """The next piece to copy ahead, into one of `room` slots where it is a copy's first."""
        ready, copying = self.ready, self._lanes.copying
        before = int(ready.queue.span[0])
        taken = _take(self._lanes, ready.queue, ready.cache, ready.costs, self._routed, room)
        if taken < 0:
            if ready.queue.span[0] != before:
                self._link.append((self.turn, LOOKED, int(room > 0), 0))
            return None
        if taken > 0:
            self._pieces = int(copying[P_CHUNKS])
        layer, expert = self.crossing
        self._link.append((self.turn, BEGAN, layer, expert))
        piece = self._pieces - int(copying[P_CHUNKS])
        return Crossing(layer, expert, piece, self._pieces, int(self._lanes.t[LINK_LEFT]) // PPM)

    def crossed(self) -> int:
        """The piece has crossed. Returns -1, or if the expert has landed with it the slots that
        the executing layer-step may take now in addition.
        """
        ready = self.ready
        self._link.append((self.turn, CROSSED, *self.crossing))
        return int(_cross(self._lanes, ready.cache, self._routed, self._busy_layer, ready.rules))

    @property
    def crossing(self) -> tuple[int, int]:
        """(layer, expert) of the copy that is being made ahead, or was last."""
        copying = self._lanes.copying
        return int(copying[P_LAYER]), int(copying[P_EXPERT])

    def evicted(self) -> list[tuple[int, int]]:
        """(layer, expert) of the residents that the last decision took out."""
        experts = self.ready.cache.resident.shape[1]
        gone = self.ready.plan.evicted[: self.ready.plan.count[N_EVICTED]]
        return [divmod(int(entry), experts) for entry in gone]

    def first_uses(self) -> list[int]:
        """Residents of the layer that were copied ahead and are used for the first time."""
        entries = self._lanes.log[: self._lanes.logged[0]]
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
