"""The four kinds of part. A part is a frozen dataclass of its hyper-parameters plus its functions.

The kernel gets the hyper-parameters by the names of the fields (`params.share`), and by the names
of a `Memory` what the part keeps between steps (`memory.tokens`): zeros at the start of each
request, unless the part has `learned`; oracles begin with what they know (`first_memory`).
`needs` names the trace columns without which the part refuses to run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from oled.policies.interface import (
    ALLOCATE,
    ASK,
    DISPATCH,
    WATCH,
    At,
    Cache,
    Costs,
    Plan,
    Queue,
    Side,
    Step,
)
from oled.policies.kernel import Memory, NoMemory, kernel
from oled.policies.struct import Struct, struct_of_numbers

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

    def params(self) -> Struct:
        """Return the hyper-parameters that are numbers, by name, for the kernel."""
        numbers: type[Struct] = _params_of(type(self))  # type: ignore[arg-type]
        return numbers(**{name: getattr(self, name) for name in numbers.ref.fields})

    def memory(self, layers: int, experts: int) -> Memory:
        """Return what the part remembers of a model at the start of a request."""
        return NoMemory()

    def first_memory(self, steps: Steps) -> Memory:
        """Return what the part remembers before the first layer-step of `steps`."""
        return self.memory(steps.num_layers, int(steps.num_experts.max()))


_KINDS: dict[Any, type] = {kind: kind for kind in (int, float, bool)} | {
    kind.__name__: kind for kind in (int, float, bool)
}


@functools.cache
def _params_of(part: type[Part]) -> type[Struct]:
    """Return the struct of a part's fields that are annotated as int, float or bool."""
    fields = dataclasses.fields(part)
    kinds = {field.name: _KINDS[field.type] for field in fields if field.type in _KINDS}
    return struct_of_numbers(part.__name__, kinds)


@dataclasses.dataclass(frozen=True, slots=True)
class Retention(Part):
    """Gives every expert of a layer a score; the lowest leaves first.

    Set `observe`: a kernel (OBSERVE), or a method `observe(step, cache, memory, params)`.
    """

    scores: ClassVar[bool] = True
    """Whether it scores at all; if not, only `admission: frozen` makes sense."""
    observe: ClassVar[Callable[..., Any]]


@kernel(WATCH)
def watch_nothing(step: Step, cache: Cache, memory: NoMemory, params: Struct) -> None:
    pass


@kernel(ALLOCATE)
def keep_capacity(at: At, cache: Cache, memory: NoMemory, params: Struct) -> None:
    pass


@kernel(DISPATCH)
def transfer_all(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: Struct
) -> None:
    pass


@kernel(ASK)
def ask_nothing(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: NoMemory,
    params: Struct,
) -> None:
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
