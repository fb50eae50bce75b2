"""What single calls cost on this machine: median and spread. What every backend's host does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from oled.live.kernels import ExpertForm
from oled.live.store import Numbers
from oled.models.catalogue import ModelGeometry

MOST_TOKENS = 256
_BUDGET_NS = 300_000_000  # for one measurement


@dataclass(frozen=True, slots=True)
class Spread:
    """Nanoseconds: 10th percentile, median and 90th percentile of single calls."""

    low: float
    value: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        low, value, high = np.percentile(times, (10, 50, 90))
        return cls(float(low), float(value), float(high))

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.low + other.low, self.value + other.value, self.high + other.high)

    def scaled(self, factor: float) -> Spread:
        return Spread(self.low * factor, self.value * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Together:
    """CPU experts and copies, each alone and while the other runs; one expert each."""

    cpu_alone: Spread
    cpu_beside: Spread
    copy_alone: Spread
    copy_beside: Spread


class Bench(Protocol):
    """What a backend's machine is asked. Times of experts are those of its lanes."""

    backend: str
    device: str  # as its driver says, or the processor
    gpu: str  # in words
    numbers: Numbers
    form: ExpertForm
    cpu_threads: int  # of the CPU lane
    facts: dict[str, Any]  # about the machine
    absent: dict[str, str]  # what this machine has not, and why

    def warm(self) -> None:
        """Clocks go up, code is compiled."""

    def close(self) -> None:
        """Give the memory back."""

    def copy(self, size: int, *, inward: bool, pinned: bool) -> Spread:
        """One copy of so many bytes behind another."""

    def copy_alone(self, size: int, *, pinned: bool) -> Spread:
        """One copy to the device on an idle link."""

    def pieces(self, count: int) -> Spread:
        """One expert in `count` copies, waited for."""

    def group(self, active: int, tokens: int, top_k: int) -> Spread:
        """One launch group of `active` experts that share `tokens` x `top_k` pairs evenly."""

    def cpu_expert(self, tokens: int, threads: int) -> Spread:
        """One expert on the CPU, its weights cold."""

    def together(self) -> Together:
        """Measure an expert on the CPU lane and a copy, each alone and beside the other."""

    def lanes_beside(self) -> dict[str, float]:
        """Return how many times slower a lane is while another works, by "gpu beside link" and so
        on; empty where only `together` is measured.
        """

    def dense_layer(self, model: ModelGeometry, tokens: int, context: int) -> Spread:
        """A layer without its routed experts: kernels only."""

    def head(self, model: ModelGeometry, tokens: int) -> Spread:
        """The logits of `tokens` tokens."""

    def elementwise(self) -> Spread:
        """One small kernel."""

    def calls(self) -> dict[str, Spread]:
        """Host times: `copy` to put one on a stream, `launch` a kernel, `sync` until it is done."""

    def crossing(self, size: int) -> Spread:
        """Activations of so many bytes to the host and back, beyond the bytes."""

    def cpu_call(self) -> Spread:
        """Dispatch and join of a batch of CPU experts, without the experts."""

    def peak(self) -> tuple[int, Spread]:
        """Operations of one large product on the device, and its time."""

    def device_stream(self) -> tuple[int, Spread]:
        """Bytes read and written by one copy within the device, and its time."""

    def host_stream(self) -> tuple[int, Spread]:
        """The same within host memory, by the threads of the CPU lane."""


def timed(job: Callable[[int], Any], calls: int = 400) -> Spread:
    """Single calls of `job(turn)` by the host's clock, fewer where they are slow."""
    for turn in range(3):
        job(turn)
    times: list[float] = []
    began = time.perf_counter_ns()
    for turn in range(calls):
        before = time.perf_counter_ns()
        job(turn)
        now = time.perf_counter_ns()
        times.append(now - before)
        if now - began > _BUDGET_NS and len(times) >= 5:
            break
    return Spread.of(times)


def hand_off(calls: int = 400) -> Spread:
    """From a put to another thread's waking up, one way; the lane is asleep each time."""
    there: SimpleQueue[int | None] = SimpleQueue()
    back: SimpleQueue[int] = SimpleQueue()

    def lane() -> None:
        while (put := there.get()) is not None:
            back.put(time.perf_counter_ns() - put)

    thread = threading.Thread(target=lane)
    thread.start()
    times = []
    for _ in range(calls):
        time.sleep(2e-4)
        there.put(time.perf_counter_ns())
        times.append(back.get())
    there.put(None)
    thread.join()
    return Spread.of(times)
