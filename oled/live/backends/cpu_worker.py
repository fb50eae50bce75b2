"""Experts on the CPU: the fastest correct way on this machine, found by measurement.

Products in bfloat16 or float16 are fast on a CPU that has instructions for them and up to hundreds
of times slower than in float32 where it has none; float32 products need each expert widened first.
How many threads are best depends on the memory and on who else runs. So both ways are timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oled.live.backends import products
from oled.live.kernels import ExpertForm

_TOKENS = (1, 4, 16)
_TIMES = 3  # calls of each way, after one to warm up
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class CpuWay:
    """In which numbers, and with how many threads."""

    widened: bool  # to float32, an expert at a time
    threads: int
    expert_ns: float = 0.0  # one expert, mean over 1, 4 and 16 tokens; 0: not measured

    def name(self, dtype: torch.dtype) -> str:
        kept = str(dtype).removeprefix("torch.")
        return f"{kept} widened to float32" if self.widened else kept


class CpuWorker:
    """Computes experts of the host store with torch, in one way. For one thread."""

    def __init__(self, form: ExpertForm, dtype: torch.dtype, way: CpuWay) -> None:
        self.form = form
        self.way = way
        self._dtype = torch.float32 if way.widened else dtype
        self._expert = torch.empty(form.size if way.widened else 0)

    def enter(self) -> None:
        """The calling thread is the worker's from now on."""
        torch.set_num_threads(self.way.threads)

    @torch.inference_mode()
    def compute(
        self, rows: Sequence[Tensor], counts: Sequence[int], x: Tensor, out: Tensor
    ) -> None:
        """Outputs of experts `rows`, each [S], for `counts` of x [n, H], to out [n, H]."""
        begin = 0
        for row, count in zip(rows, counts, strict=True):
            mine = slice(begin, begin + count)
            expert = self._expert.copy_(row) if self.way.widened else row
            between = torch.empty(count, 2 * self.form.width, dtype=self._dtype)
            y = torch.empty(count, self.form.hidden, dtype=self._dtype)
            products.compute([expert], [count], x[mine].to(self._dtype), between, y, self.form)
            out[mine] = y
            begin += count


def fastest_way(form: ExpertForm, experts: Tensor) -> CpuWay:
    """Time both ways with all, half and a quarter of the CPUs; experts [R, S], read in turn."""
    cpus = usable_cpus()
    counts = sorted({max(1, cpus), max(1, cpus // 2), max(1, cpus // 4)}, reverse=True)
    kinds = [False] if experts.dtype == torch.float32 else [False, True]
    before = torch.get_num_threads()
    try:
        ways = [
            CpuWay(widened, threads, _time(form, experts, CpuWay(widened, threads)))
            for widened in kinds
            for threads in counts
        ]
    finally:
        torch.set_num_threads(before)
    return min(ways, key=lambda way: way.expert_ns)


def _time(form: ExpertForm, experts: Tensor, way: CpuWay) -> float:
    worker = CpuWorker(form, experts.dtype, way)
    worker.enter()
    total, row = 0.0, 0
    for tokens in _TOKENS:
        x = torch.ones(tokens, form.hidden, dtype=experts.dtype)
        out = torch.empty_like(x)
        times = []
        for _ in range(_TIMES + 1):
            row = (row + 1) % len(experts)
            began = time.perf_counter_ns()
            worker.compute([experts[row]], [tokens], x, out)
            times.append(time.perf_counter_ns() - began)
        total += min(times[1:])
    return total / len(_TOKENS)


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, within the cgroup's quota."""
    cpus = len(os.sched_getaffinity(0))
    if _QUOTA.is_file():
        quota, _, period = _QUOTA.read_text().partition(" ")
        if quota.isdigit():
            cpus = min(cpus, max(1, round(int(quota) / int(period))))
    return cpus
