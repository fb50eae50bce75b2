"""The decisions of a whole trace without a clock: what deciding costs by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import types

from oled._jit import bare_njit
from oled.errors import UserError
from oled.policies.decide import decide
from oled.sim.parts import PARTS, Parts
from oled.sim.prepare import Assembly
from oled.sim.replay import begin_forward
from oled.sim.state import State, point_at


def decide_all(parts: Parts, state: State) -> None:
    """Decide every layer-step; nothing is counted, and nothing is copied ahead."""
    work, step = state.work, state.step
    for forward in range(work.request.size):
        begin_forward(parts, None, state, forward)
        for index in range(work.step_offsets[forward], work.step_offsets[forward + 1]):
            point_at(step, work, index, forward)
            decide(parts, step, state.cache, state.costs, state.plan, state.rules)


@functools.cache
def _compiled() -> Callable[[Parts, State], None]:
    compiled: Callable[..., None] = bare_njit(types.void(PARTS, State.ref))(decide_all)
    return compiled


def decision_loop(ready: Assembly) -> Callable[[], None]:
    """Return a function that decides the whole trace anew.

    Raises UserError where a part is plain Python.
    """
    if not ready.parts.compiled:
        raise UserError("decisions are timed for compiled parts only")
    loop, parts, state = _compiled(), ready.parts.opaque(), ready.state
    return lambda: loop(parts, state)
