"""The description of a backend: its memory, its number formats and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from oled.errors import UserError
from oled.live.backends import Backend
from oled.live.kernels import ExpertForm
from oled.live.store import NUMBERS, Numbers, Preflight, Store, free_host_memory
from oled.models.catalogue import ModelGeometry
from oled.policies.composition import Composition
from oled.policies.interface import Costs
from oled.types import Ints

S = TypeVar("S", bound=Store)
Progress = Callable[[range], Any]
"""Wraps the rows of a store while they are written, such as in a bar."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[S]):
    """A backend that can be run here, with experts in a store `S`."""

    name: str
    machine: str  # the device, as its driver says, or the processor
    device: str  # where a model's other layers run, in torch's words
    numbers: tuple[str, ...]  # of weights that it computes with; the first is its own choice
    tolerance: float  # of outputs with experts on the CPU, as a share of the largest; 0: bitwise
    keeps_time: bool  # its lanes last as long as a profile says, not as long as they last
    pins: bool
    device_free: Callable[[], int | None]  # bytes; None where the device's memory is the host's
    random: Callable[[ExpertForm, Ints, int, Numbers, Progress], S]  # seed; random experts
    make: Callable[[S, int, Costs, bool], Backend]  # store, slots, costs, paced
    held: Callable[[S], AbstractContextManager[None]]  # for several runs: pinned once
    failures: Callable[[], AbstractContextManager[None]]  # what the device says, in one line
    expert_file: Path | None = None  # of a store that is not in the host's memory

    def refuse(self, composition: Composition) -> None:
        """Raise UserError for what the store of this backend does not allow."""
        if composition.writes_back and self.expert_file is not None:
            raise UserError(
                f"policy '{composition.name}' writes evicted experts back, and the file of "
                f"link=storage is only read; take link=memory or another policy"
            )

    def as_kept(self, model: ModelGeometry | None) -> ModelGeometry | None:
        """Return the model with weights in this backend's numbers, unless its lanes keep time."""
        if model is None or self.keeps_time:
            return model
        return replace(model, weight_bytes=float(NUMBERS[self.numbers[0]].bytes))

    def preflight(
        self, store: int, slots: int, *, building: int = 0, replaced: int = 0, beside: int = 0
    ) -> Preflight:
        """Return what a run needs and what there is, in bytes. `slots`: of all slots."""
        if self.expert_file is not None:
            store = replaced = 0
        return Preflight(
            store=store,
            pinned=store if self.pins else 0,
            device=slots,
            building=building,
            host_free=free_host_memory(),
            device_free=self.device_free(),
            replaced=replaced,
            beside=beside if self.pins else 0,
        )
