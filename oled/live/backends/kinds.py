"""The backends by name."""

from __future__ import annotations

from contextlib import nullcontext

from oled.errors import UserError, nearest
from oled.hardware.this_machine import processor
from oled.live.backends import Backend
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
    make=_emulated,
    held=lambda _: nullcontext(),
    failures=nullcontext,
)
NAMES = ("emulated", "cuda")


def backend_kind(name: str) -> Kind:
    """The backend of this name; one that this machine can not run is refused."""
    if name == EMULATED.name:
        return EMULATED
    if name not in NAMES:
        raise UserError(f"backend={name} is not known; {nearest(name, NAMES)}")
    from oled.live.backends.cuda import cuda_kind
    from oled.live.backends.device import CudaDevice

    return cuda_kind(CudaDevice())
