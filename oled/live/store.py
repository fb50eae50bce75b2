"""All experts in host memory: one block of exactly their size, an expert one contiguous row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.live.kernels import ExpertForm, Floats

_CGROUP = Path("/sys/fs/cgroup")
_MARGIN = 64 * 2**20  # left to the rest of the process


@dataclass(frozen=True, slots=True)
class HostStore:
    """Row `first[l] + e` of `block` f32[R, S] is expert e of MoE layer l."""

    form: ExpertForm
    first: NDArray[np.int64]  # [L]
    num_experts: NDArray[np.int64]  # [L]
    block: Floats

    @classmethod
    def empty(cls, form: ExpertForm, num_experts: NDArray[np.int64]) -> HostStore:
        """Room for all experts, not written yet."""
        first = np.cumsum(num_experts) - num_experts
        return cls(
            form, first, num_experts, np.empty((int(num_experts.sum()), form.size), np.float32)
        )

    @classmethod
    def random(cls, form: ExpertForm, num_experts: NDArray[np.int64], seed: int = 0) -> HostStore:
        """Random weights, scaled so that outputs are of the size of inputs."""
        store = cls.empty(form, num_experts)
        rng = np.random.default_rng(seed)
        for row in store.block:
            rng.standard_normal(out=row, dtype=np.float32)
        np.multiply(store.block, np.float32(form.hidden**-0.5), out=store.block)
        return store

    def rows(self, layer: int) -> Floats:
        """The experts of one layer, a view [E, S]."""
        first = int(self.first[layer])
        return self.block[first : first + int(self.num_experts[layer])]


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

    @property
    def host(self) -> int:
        """Host memory still to be allocated at the peak."""
        own = self.device if self.device_free is None else 0
        return self.store - self.replaced + self.building + own

    def check(self) -> None:
        """Refuse before anything is allocated."""
        if self.host + _MARGIN > self.host_free:
            raise UserError(
                f"the live run needs {_mib(self.host + _MARGIN)} of host memory "
                f"more ({self}), "
                f"{_mib(self.host_free)} are free: take a smaller model or fewer cache.slots, or "
                f"raise the memory limit"
            )
        if self.device_free is not None and self.device > self.device_free:
            raise UserError(
                f"the slots need {_mib(self.device)} of device memory, {_mib(self.device_free)} "
                f"are free: take fewer cache.slots"
            )

    def __str__(self) -> str:
        where = "host" if self.device_free is None else "device"
        return (
            f"host store {_mib(self.store)}, pinned {_mib(self.pinned)}, given back by the model "
            f"{_mib(self.replaced)}, while building {_mib(self.building)}, slots "
            f"{_mib(self.device)} ({where} memory)"
        )


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
