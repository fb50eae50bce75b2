"""The description of a backend: its memory, its number formats and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from oled.live.backends import Backend
from oled.live.store import HostStore, Preflight, free_host_memory
from oled.policies.interface import Costs


@dataclass(frozen=True, slots=True)
class Kind:
    """A backend that can be run here."""

    name: str
    machine: str  # the device, as its driver says, or the processor
    device: str  # where a model's other layers run, in torch's words
    numbers: tuple[str, ...]  # of weights that it computes with; the first is its own choice
    tolerance: float  # of outputs with experts on the CPU, as a share of the largest; 0: bitwise
    keeps_time: bool  # its lanes last as long as a profile says, not as long as they last
    pins: bool
    device_free: Callable[[], int | None]  # bytes; None where the device's memory is the host's
    make: Callable[[HostStore, int, Costs, bool], Backend]  # store, slots, costs, paced
    held: Callable[[HostStore], AbstractContextManager[None]]  # for several runs: pinned once
    failures: Callable[[], AbstractContextManager[None]]  # what the device says, in one line

    def preflight(
        self, store: int, slots: int, *, building: int = 0, replaced: int = 0, beside: int = 0
    ) -> Preflight:
        """What a run needs and what there is; bytes. `slots`: of all slots."""
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
