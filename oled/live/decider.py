"""The simulator's decisions, one layer-step at a time, with the simulator's own log of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit
from oled.errors import UserError
from oled.policies import interface
from oled.policies.composition import Composition
from oled.policies.decide import decide
from oled.policies.interface import N_EVICTED, At, Cache, Costs, Kernel, Plan, Rules, Step
from oled.policies.part import ask_nothing
from oled.sim.lanes import Lanes
from oled.sim.prepare import Assembly
from oled.sim.replay import clear, fit_capacities, reset
from oled.sim.settings import Settings
from oled.sim.tally import Tally, count_step, write_plan
from oled.trace.steps import Steps


@dataclass(frozen=True, slots=True, eq=False)
class PlanLog:
    """What was decided, N entries in the order of the layer-steps, as the simulator's `Tally`."""

    plans: NDArray[np.uint8]  # [N] state | place << 2 | stays << 4
    orders: NDArray[np.int32]  # [N] place in the transfer order, -1 if none


def first_difference(live: PlanLog, simulated: PlanLog, steps: Steps) -> str | None:
    """Where two plan logs part, in words; None where they are equal."""
    if live.plans.size != simulated.plans.size:
        return f"{live.plans.size} entries live, {simulated.plans.size} simulated"
    unequal = (live.plans != simulated.plans) | (live.orders != simulated.orders)
    if not unequal.any():
        return None
    entry = int(np.argmax(unequal))
    step = int(np.searchsorted(steps.offsets, entry, side="right")) - 1
    return (
        f"forward {steps.forward[step]}, MoE layer {steps.layer[step]}, expert "
        f"{steps.expert[entry]}: live plan {live.plans[entry]:#04x} place "
        f"{live.orders[entry]}, simulated {simulated.plans[entry]:#04x} place "
        f"{simulated.orders[entry]}"
    )


def refuse_unsupported(composition: Composition, settings: Settings) -> None:
    """What the executor cannot do yet is refused by name, before anything is allocated."""
    name = composition.name
    if type(composition.prefetch).ask is not ask_nothing:
        raise UserError(
            f"policy '{name}' prefetches: the live executor copies on demand only, "
            f"simulate it instead"
        )
    if not composition.overlap:
        raise UserError(
            f"policy '{name}' waits for every copy (overlap: false): the live executor always "
            f"overlaps, simulate it instead"
        )
    if settings.unbounded:
        raise UserError(
            "cache.staging=unbounded is an accounting replay: a live run needs a number of slots"
        )


def _decide_step(
    observe: Callable[..., None],
    watch: Callable[..., None],
    dispatch: Callable[..., None],
    params: tuple[NDArray[np.float64], ...],
    memory: tuple[NDArray[np.float64], ...],
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    rules: Rules,
    lanes: Lanes,
    tally: Tally,
) -> int:
    """Decide, count and write down one layer-step, in the order of `oled.sim.replay.replay`."""
    slots: int = decide(observe, watch, dispatch, params, memory, step, cache, costs, plan, rules)
    count_step(step, cache, plan, lanes, tally, 0)
    write_plan(step, plan, tally, 0)
    return slots


_SIGNATURES = (interface.OBSERVE, interface.WATCH, interface.DISPATCH)


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
    pointers = tuple(map(types.FunctionType, _SIGNATURES))
    compiled: Callable[..., int] = bare_njit(types.int64(*pointers, *signature))(_decide_step)
    return compiled


class Decider:
    """Decides for a live run. `ready` is what the simulator would replay with."""

    def __init__(self, ready: Assembly) -> None:
        self.ready = ready
        experts = ready.cache.resident.shape[1]
        self.tally = ready.tally._replace(
            by_phase=np.zeros((1, *ready.tally.by_phase.shape[1:]), np.int64),
            plans=np.zeros(experts, np.uint8),
            orders=np.zeros(experts, np.int32),
        )
        parts = ready.functions
        functions = [p.compiled() if isinstance(p, Kernel) else p for p in parts]
        self._allocate = functions[2]
        self._deciders: list[Any] = [functions[0], functions[1], functions[3]]
        self._run: Callable[..., int] = _decide_step
        if all(isinstance(part, Kernel) for part in parts):
            around = [numba.typeof(data) for data in self._data()]
            self._run = _compiled((*around[:2], interface.STEP, *around[2:]))
            self._deciders = [
                _Pointer(part, sig) for part, sig in zip(self._deciders, _SIGNATURES, strict=True)
            ]
        self._plans: list[NDArray[np.uint8]] = []
        self._orders: list[NDArray[np.int32]] = []
        self._steps = 0

    def _data(self) -> tuple[Any, ...]:
        """What `_decide_step` gets beside functions and step, in its order."""
        ready = self.ready
        return (
            ready.params,
            ready.memory,
            ready.cache,
            ready.costs,
            ready.plan,
            ready.rules,
            ready.lanes,
            self.tally,
        )

    def begin_request(self) -> None:
        """Scores, residency and allocation start afresh; learned memory stays."""
        reset(self.ready.cache, self.ready.start)
        for memory, learned in zip(self.ready.memory, self.ready.learned, strict=True):
            if not learned or self._steps == 0:
                clear(memory)

    def begin_forward(self, at: At) -> list[tuple[int, int]]:
        """Allocate slots; returns (layer, expert) of the residents that lost theirs."""
        ready = self.ready
        self._allocate(at, ready.cache, ready.memory[1], ready.params[1])
        if ready.rules.pooled:
            return []
        fit_capacities(ready.cache, ready.plan, ready.lanes)
        return self.evicted()

    def decide(self, step: Step) -> int:
        """Fill `ready.plan`; returns the slots that copies may take at once."""
        params, memory, *rest = self._data()
        slots = self._run(*self._deciders, params, memory, step, *rest)
        active = step.expert.size
        self._plans.append(self.tally.plans[:active].copy())
        self._orders.append(self.tally.orders[:active].copy())
        self._steps += 1
        return int(slots)

    def evicted(self) -> list[tuple[int, int]]:
        """(layer, expert) of the residents that the last decision took out."""
        experts = self.ready.cache.resident.shape[1]
        gone = self.ready.plan.evicted[: self.ready.plan.count[N_EVICTED]]
        return [divmod(int(entry), experts) for entry in gone]

    def log(self) -> PlanLog:
        """Everything decided so far."""
        return PlanLog(
            np.concatenate([np.zeros(0, np.uint8), *self._plans]),
            np.concatenate([np.zeros(0, np.int32), *self._orders]),
        )
