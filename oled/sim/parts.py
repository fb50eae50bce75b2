"""The functions of a policy's parts as the driver calls them, with their memory and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from oled.policies.composition import Composition
from oled.policies.interface import ALLOCATE, ASK, DISPATCH, OBSERVE, WATCH
from oled.policies.kernel import Compiled, Kernel, Memory, Opaque
from oled.policies.struct import Struct
from oled.trace.steps import Steps


class Each(NamedTuple):
    """The same thing of each part."""

    retention: Any
    allocation: Any
    dispatch: Any
    prefetch: Any


class Parts(NamedTuple):
    """The parts' functions, and what they are given beside the state."""

    observe: Callable[..., None]
    watch: Callable[..., None]
    allocate: Callable[..., None]
    dispatch: Callable[..., None]
    ask: Callable[..., None]
    memory: Each  # of Memory
    params: Each  # of Struct
    cells: Each  # f64[n] of memory that is cleared with each request; [0] where it is learned

    @property
    def compiled(self) -> bool:
        """Whether compiled code can call all of them."""
        return all(isinstance(function, Compiled) for function in self[:5])

    def opaque(self) -> Parts:
        """Return them for compiled code, which need not know the fields of memory and params."""
        memory, params = (Each(*map(Opaque.of, each)) for each in (self.memory, self.params))
        return self._replace(memory=memory, params=params)


def parts_of(composition: Composition, steps: Steps) -> Parts:
    """Return the parts of a composition at the beginning of a replay of `steps`."""
    parts = Each(*composition.parts)
    memory = Each(*(part.first_memory(steps) for part in parts))
    params = Each(*(part.params() for part in parts))
    learned = np.zeros(0)
    return Parts(
        observe=_bound(parts.retention.observe, memory.retention, params.retention),
        watch=_bound(parts.allocation.watch, memory.allocation, params.allocation),
        allocate=_bound(parts.allocation.allocate, memory.allocation, params.allocation),
        dispatch=_bound(parts.dispatch.dispatch, memory.dispatch, params.dispatch),
        ask=_bound(parts.prefetch.ask, memory.prefetch, params.prefetch),
        memory=memory,
        params=params,
        cells=Each(
            *(learned if p.learned else m.cells for p, m in zip(parts, memory, strict=True))
        ),
    )


def _bound(function: Any, memory: Memory, params: Struct) -> Callable[..., None]:
    """Return a kernel's machine code, or a function in plain Python itself."""
    compiles = isinstance(function, Kernel) and not numba.config.DISABLE_JIT
    bound: Callable[..., None] = function.compiled(memory, params) if compiles else function
    return bound


def _parts_type() -> Any:
    opaque = types.NamedUniTuple(Opaque.ref, 4, Each)
    cells = types.NamedUniTuple(types.Array(types.float64, 1, "C"), 4, Each)
    pointers = [role.pointer for role in (OBSERVE, WATCH, ALLOCATE, DISPATCH, ASK)]
    return types.NamedTuple([*pointers, opaque, opaque, cells], Parts)


PARTS = _parts_type()
"""The numba type of opaque parts."""
