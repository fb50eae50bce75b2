"""The decisions of a whole trace without a clock: what deciding costs by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit
from oled.errors import UserError
from oled.policies import interface
from oled.policies.decide import decide
from oled.policies.interface import At, Cache, Costs, Kernel, Plan, Rules
from oled.sim.prepare import Assembly
from oled.sim.replay import Workload, step_of


def decide_all(
    observe: Callable[..., None],
    watch: Callable[..., None],
    allocate: Callable[..., None],
    dispatch: Callable[..., None],
    params: tuple[NDArray[np.float64], ...],
    memory: tuple[NDArray[np.float64], ...],
    work: Workload,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    rules: Rules,
) -> None:
    """Decide every layer-step of `work`, as `replay` does."""
    for forward in range(work.request.size):
        at = At(forward, work.phase[forward], work.block[forward], work.denoising_step[forward], 0)
        allocate(at, cache, memory[1], params[1])
        for index in range(work.step_offsets[forward], work.step_offsets[forward + 1]):
            step = step_of(work, index, forward)
            decide(observe, watch, dispatch, params, memory, step, cache, costs, plan, rules)


@functools.cache
def _compiled(signature: tuple[Any, ...]) -> Callable[..., None]:
    pointers = tuple(
        types.FunctionType(sig)
        for sig in (interface.OBSERVE, interface.WATCH, interface.ALLOCATE, interface.DISPATCH)
    )
    compiled: Callable[..., None] = bare_njit(types.void(*pointers, *signature))(decide_all)
    return compiled


def decision_loop(ready: Assembly) -> Callable[[], None]:
    """A function that decides the whole trace again, from the residency it finds."""
    parts = ready.functions[:4]
    if not all(isinstance(part, Kernel) for part in parts):
        raise UserError("decisions are timed for compiled parts only")
    data = (
        ready.params,
        ready.memory,
        ready.work,
        ready.cache,
        ready.costs,
        ready.plan,
        ready.rules,
    )
    ready.cache.capacity[:] = ready.start.capacity
    loop = _compiled(tuple(numba.typeof(argument) for argument in data))
    pointers = [part.compiled() for part in parts]
    return lambda: loop(*pointers, *data)
