"""The four kinds of part. A part is a frozen dataclass of its hyper-parameters plus its functions.

`params()` hands the hyper-parameters to the kernel as float64, in the order of the fields.
`memory_shape` is the state that a part keeps between steps ([*, *, *], float64), cleared with each
request unless `learned`; oracles write what they know of the future there (`first_memory`).
`needs` names the trace columns without which the part refuses to run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from oled.policies.interface import ALLOCATE, ASK, DISPATCH, WATCH, kernel

if TYPE_CHECKING:
    from oled.trace.steps import Steps

NEEDS = {
    "weights": "gate weights",
    "confidence": "token confidence",
    "order": "the order of forwards",
    "scores": "router scores of all experts",
    "predictions": "a predictor's recorded output",
    "coming": "predictions of the next forward",
    "calibration": "a calibration trace (calibration=NAME|DIR)",
    "blocks": "block and denoising-step marks",
    "stages": "stages (blocks, or marks in autoregressive text)",
    "drafts": "drafts and their verification",
    "halves": "expert halves (`oled paths` makes a trace of them)",
    "future": "the routing to come (an oracle)",
}
"""What a part may need of a trace, in words."""
INSTEAD = {
    "order": "policy=cpu_all and, with a calibration trace, policy=static_popularity do without",
    "weights": "policies such as lru do without",
    "confidence": "policy=gate_sum goes by gate weights alone",
    "stages": "workload.stages=FILE|learned marks them by cues in its tokens",
    "drafts": "record with decode=speculative_blocks or decode=speculative_autoregressive",
    "coming": "record with heads=FILE of experiments/training/train_predictors.py",
    "scores": "record with score_width=M, the M best scores of each token",
}
"""What to do where a trace has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    needs: ClassVar[frozenset[str]] = frozenset()
    learned: ClassVar[bool] = False

    def params(self) -> NDArray[np.float64]:
        return np.array([float(v) for v in dataclasses.astuple(self)] or [0.0])

    def memory_shape(self, layers: int, experts: int) -> tuple[int, int, int]:
        return (1, 1, 1)

    def first_memory(self, steps: Steps) -> NDArray[np.float64]:
        """What the part remembers before the first layer-step of `steps`: nothing."""
        return np.zeros(self.memory_shape(steps.num_layers, int(steps.num_experts.max())))


@dataclasses.dataclass(frozen=True, slots=True)
class Retention(Part):
    """Gives every expert of a layer a score; the lowest leaves first.

    Set `observe`: a kernel (OBSERVE), or a method `observe(step, cache, memory, params)`.
    """

    scores: ClassVar[bool] = True
    """Whether it scores at all; if not, only `admission: frozen` makes sense."""
    observe: ClassVar[Callable[..., Any]]


@kernel(WATCH)
def watch_nothing(step, cache, memory, params):  # type: ignore[no-untyped-def]
    pass


@kernel(ALLOCATE)
def keep_capacity(at, cache, memory, params):  # type: ignore[no-untyped-def]
    pass


@kernel(DISPATCH)
def transfer_all(step, cache, costs, plan, memory, params):  # type: ignore[no-untyped-def]
    pass


@kernel(ASK)
def ask_nothing(step, cache, costs, plan, side, queue, memory, params):  # type: ignore[no-untyped-def]
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation(Part):
    """Gives every layer its slots under one budget."""

    watch: ClassVar[Callable[..., Any]] = watch_nothing
    allocate: ClassVar[Callable[..., Any]] = keep_capacity

    def initial(
        self,
        even: NDArray[np.int64],
        num_experts: NDArray[np.int64],
        expert_bytes: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Slots of each layer at the start i64[L], from an even share; no more bytes in all."""
        return even


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatch(Part):
    """Splits the work of the active set between transfers and the CPU."""

    transfers: ClassVar[bool] = True
    """Whether anything may be copied on demand (if not, no staging slot is needed)."""
    reads_costs: ClassVar[bool] = True
    """Whether decisions may follow the machine's costs; where not, sweeps decide once for all."""
    dispatch: ClassVar[Callable[..., Any]] = transfer_all

    @property
    def drops(self) -> bool:
        """Whether misses may be left out, or approximated, so that the model's outputs change."""
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetch(Part):
    """Asks for copies into later layers or the next forward."""

    ask: ClassVar[Callable[..., Any]] = ask_nothing
