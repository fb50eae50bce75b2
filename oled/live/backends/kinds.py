"""The backends by name."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from oled.errors import UserError, nearest
from oled.hardware.this_machine import processor
from oled.live.backends import Backend
from oled.live.backends.cpu import MEMORY, STORAGE, cpu_kind
from oled.live.backends.emulated import Emulated
from oled.live.backends.kind import Kind
from oled.live.store import HostStore
from oled.policies.interface import Costs


def _emulated(store: HostStore, slots: int, costs: Costs, paced: bool) -> Backend:
    return Emulated(store, slots, costs, paced=paced)


EMULATED = Kind(
    name="emulated",
    machine=processor(),
    device="cpu",
    numbers=("float32",),
    tolerance=0.0,
    keeps_time=True,
    pins=False,
    device_free=lambda: None,
    random=HostStore.random,
    make=_emulated,
    held=lambda _: nullcontext(),
    failures=nullcontext,
)
NAMES = ("emulated", "cpu", "cuda")


def backend_kind(name: str, link: str = MEMORY, expert_file: Path | None = None) -> Kind[Any]:
    """Return the backend of this name.

    Raises UserError where this machine cannot run it, or where it has no such link.
    """
    if name not in NAMES:
        raise UserError(f"backend={name} is not known; {nearest(name, NAMES)}")
    if name == "cpu":
        return cpu_kind(link, expert_file)
    if link != MEMORY or expert_file is not None:
        raise UserError(f"link={STORAGE} and expert_file go with backend=cpu, not backend={name}")
    if name == EMULATED.name:
        return EMULATED
    from oled.live.backends.cuda import cuda_kind
    from oled.live.backends.device import CudaDevice

    return cuda_kind(CudaDevice())
