"""All experts in host memory: one block of exactly their size, an expert one contiguous row.

NumPy has no bfloat16: such numbers are kept as their bits, u16.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.live.kernels import ExpertForm
from oled.types import Floats

_CGROUP = Path("/sys/fs/cgroup")
_MARGIN = 64 * 2**20  # left to the rest of the process
_STRIDE = 97  # numbers between the beginnings of two random rows


@dataclass(frozen=True, slots=True)
class Numbers:
    """How the numbers of weights are kept."""

    name: str  # as torch calls it
    kept_as: type[np.generic]

    @property
    def bytes(self) -> int:
        return int(np.dtype(self.kept_as).itemsize)

    def of(self, values: Floats) -> NDArray[Any]:
        """f32 numbers in this form, rounded to nearest even."""
        if self.name != "bfloat16":
            return values.astype(self.kept_as)
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def widened(self, values: NDArray[Any]) -> Floats:
        """The same numbers as f32."""
        if self.name != "bfloat16":
            return values.astype(np.float32)
        return (values.astype(np.uint32) << 16).view(np.float32)


FLOAT32 = Numbers("float32", np.float32)
NUMBERS = {
    kind.name: kind
    for kind in (FLOAT32, Numbers("float16", np.float16), Numbers("bfloat16", np.uint16))
}


@dataclass(frozen=True, slots=True)
class HostStore:
    """Row `first[l] + e` of `block` [R, S] is expert e of MoE layer l."""

    form: ExpertForm
    first: NDArray[np.int64]  # [L]
    num_experts: NDArray[np.int64]  # [L]
    block: NDArray[Any]
    numbers: Numbers = FLOAT32

    @classmethod
    def empty(
        cls, form: ExpertForm, num_experts: NDArray[np.int64], numbers: Numbers = FLOAT32
    ) -> HostStore:
        """Room for all experts, not written yet."""
        first = np.cumsum(num_experts) - num_experts
        rows = int(num_experts.sum())
        block = page_aligned(rows * form.size * numbers.bytes).view(numbers.kept_as)
        return cls(form, first, num_experts, block.reshape(rows, form.size), numbers)

    @classmethod
    def random(
        cls,
        form: ExpertForm,
        num_experts: NDArray[np.int64],
        seed: int = 0,
        numbers: Numbers = FLOAT32,
        progress: Callable[[range], Any] = iter,
    ) -> HostStore:
        """Return a store of `random_rows`."""
        store = cls.empty(form, num_experts, numbers)
        random = random_rows(form, len(store.block), seed, numbers)
        for row in progress(range(len(store.block))):
            store.block[row] = random(row)
        return store

    @property
    def expert_bytes(self) -> int:
        return self.form.size * self.numbers.bytes

    def rows(self, layer: int) -> NDArray[Any]:
        """The experts of one layer, a view [E, S]."""
        first = int(self.first[layer])
        return self.block[first : first + int(self.num_experts[layer])]


class Store(Protocol):
    """All experts, wherever the host keeps them. Row `first[l] + e` is expert e of MoE layer l."""

    @property
    def form(self) -> ExpertForm: ...

    @property
    def first(self) -> NDArray[np.int64]: ...

    @property
    def num_experts(self) -> NDArray[np.int64]: ...

    @property
    def numbers(self) -> Numbers: ...

    @property
    def expert_bytes(self) -> int: ...


def random_rows(
    form: ExpertForm, rows: int, seed: int, numbers: Numbers = FLOAT32
) -> Callable[[int], NDArray[Any]]:
    """Return random experts by row, scaled so that outputs are of the size of inputs.

    Each row [S] is another window of one random series, so that tens of GiB are there as fast as
    memory is written.
    """
    rng = np.random.default_rng(seed)
    series = rng.standard_normal(form.size + _STRIDE * rows, dtype=np.float32)
    kept = numbers.of(series * np.float32(form.hidden**-0.5))
    return lambda row: kept[_STRIDE * row : _STRIDE * row + form.size]


def page_aligned(size: int) -> NDArray[np.uint8]:
    """Return `size` bytes that begin with a page, to be pinned exactly or read into directly."""
    block = np.empty(size + mmap.PAGESIZE, np.uint8)
    begin = -block.ctypes.data % mmap.PAGESIZE
    return block[begin : begin + size]


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a live run needs, in bytes, and what there is."""

    store: int  # host: all experts
    pinned: int  # of it, what must be pinned
    device: int  # slots and staging
    building: int  # host, while the store is filled: one layer twice
    host_free: int
    device_free: int | None  # None: the device's memory is host memory
    replaced: int = 0  # host: what the model gives back, a layer at a time, as the store fills
    beside: int = 0  # device: the rest of the model, its KV cache, room to work

    @property
    def host(self) -> int:
        """Host memory still to be allocated at the peak."""
        own = self.device if self.device_free is None else 0
        return self.store - self.replaced + self.building + own

    def check(self) -> None:
        """Refuse before anything is allocated."""
        if self.host + _MARGIN > self.host_free:
            raise UserError(
                f"the live run needs {_mib(self.host + _MARGIN)} of host memory more, "
                f"{_mib(self.host_free)} are free: take a smaller model or fewer cache.slots, or "
                f"raise the memory limit ({self})"
            )
        needed = self.device + self.beside
        if self.device_free is not None and needed > self.device_free:
            beside = f", the rest of the model {_mib(self.beside)}" if self.beside else ""
            raise UserError(
                f"the slots need {_mib(self.device)} of device memory{beside}, "
                f"{_mib(self.device_free)} are free: take fewer cache.slots"
            )

    def __str__(self) -> str:
        where = "host" if self.device_free is None else "device"
        parts = [
            ("host store", self.store, ""),
            ("pinned", self.pinned, ""),
            ("given back by the model", self.replaced, ""),
            ("while building", self.building, ""),
            ("slots", self.device, f" ({where} memory)"),
            ("the rest of the model", self.beside, ""),
        ]
        said = [f"{name} {_mib(size)}{more}" for name, size, more in parts if size]
        free = "" if self.device_free is None else f", of the device {_mib(self.device_free)}"
        return f"{', '.join(said)}; free host memory {_mib(self.host_free)}{free}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def free_host_memory() -> int:
    """Bytes that may still be allocated: what the system has, within the cgroup's limit."""
    free = _meminfo("MemAvailable")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used + _reclaimable())
    return max(0, free)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/meminfo has no {key}: the free host memory can not be told")


def _number(file: Path) -> int | None:
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None


def _reclaimable() -> int:
    """Cached files count as used in a cgroup, and make room when memory is asked for."""
    file = _CGROUP / "memory.stat"
    if not file.is_file():
        return 0
    stat = dict(line.split() for line in file.read_text().splitlines())
    return int(stat.get("inactive_file", "0"))
