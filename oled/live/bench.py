"""Single calls of everything that an emulated lane does, timed: median and spread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from oled.live.kernels import SILU, ExpertForm, compute, copy_poisoned, group_pairs
from oled.live.store import HostStore
from oled.models.catalogue import ModelGeometry

STREAM_BYTES = 192 * 2**20
_BLOCK_BYTES = 96 * 2**20
MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Spread:
    """Nanoseconds: 10th percentile, median and 90th percentile of single calls."""

    low: float
    value: float
    high: float

    @classmethod
    def of(cls, times: Sequence[int]) -> Spread:
        low, value, high = np.percentile(times, (10, 50, 90))
        return cls(float(low), float(value), float(high))

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.low + other.low, self.value + other.value, self.high + other.high)

    def scaled(self, factor: float) -> Spread:
        return Spread(self.low * factor, self.value * factor, self.high * factor)


def timed(calls: int, job: Callable[[int], Any]) -> Spread:
    job(0)
    times = []
    for call in range(calls):
        began = time.perf_counter_ns()
        job(call)
        times.append(time.perf_counter_ns() - began)
    return Spread.of(times)


class Bench:
    """A block of experts of one model's shape, and inputs for them."""

    def __init__(self, model: ModelGeometry) -> None:
        self.model = model
        self.form = ExpertForm(
            model.hidden_size, model.moe_intermediate_size, False, False, SILU, 0.0, 0.0
        )
        rows = max(2 * min(model.num_experts, 16), _BLOCK_BYTES // self.bytes)
        self.store = HostStore.random(self.form, np.array([rows]))
        self.rows = rows
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((MOST_TOKENS, model.hidden_size), dtype=np.float32)
        self.gated = np.zeros(self.form.width, np.float32)

    @property
    def bytes(self) -> int:
        return self.form.size * 4

    @property
    def flops(self) -> int:
        """Of one token through one expert."""
        return 2 * self.model.expert_params

    def copies(self) -> Spread:
        slots = np.zeros((8, self.form.size), np.float32)
        block = self.store.block
        return timed(
            self._calls(), lambda i: copy_poisoned(block[i % self.rows], slots[i % len(slots)])
        )

    def group(self, active: int, tokens: int, top_k: int) -> Spread:
        """One call for `active` experts that share `tokens` x `top_k` pairs evenly."""
        ids = np.arange(tokens * top_k, dtype=np.int32) % active
        starts, pairs = np.zeros(active + 1, np.int64), np.zeros(ids.size, np.int64)
        group_pairs(ids, np.arange(active), starts, pairs)
        weight = np.ones(ids.size, np.float32)
        y = np.zeros((ids.size, self.form.hidden), np.float32)
        chosen = np.arange(active)

        def call(turn: int) -> None:
            row = (np.arange(active) + turn * active) % self.rows
            compute(
                self.store.block,
                row,
                chosen,
                starts,
                pairs,
                top_k,
                self.x,
                weight,
                y,
                self.gated,
                self.form,
            )

        return timed(max(5, min(200, self._calls() // max(active, tokens))), call)

    def _calls(self) -> int:
        return int(np.clip(2**30 // self.bytes, 20, 2000))


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


def tiny_copy() -> Spread:
    """What a copy costs besides its bytes."""
    source, target = np.zeros(2, np.float32), np.zeros(2, np.float32)
    return timed(2000, lambda _: copy_poisoned(source, target))


def put() -> Callable[[int], None]:
    queue: SimpleQueue[int] = SimpleQueue()
    return queue.put


def stream() -> Spread:
    """Copying STREAM_BYTES read and as many written by one thread, far beyond the caches."""
    source = np.ones(STREAM_BYTES // 8, np.float32)
    target = np.zeros_like(source)
    return timed(12, lambda _: np.copyto(target, source))


def call_overhead() -> Spread:
    """One call of the expert kernel for nothing."""
    form = ExpertForm(8, 8, False, False, SILU, 0.0, 0.0)
    block = np.zeros((1, form.size), np.float32)
    empty, starts = np.zeros(0, np.int64), np.zeros(2, np.int64)
    x, y = np.zeros((1, 8), np.float32), np.zeros((1, 8), np.float32)
    weight, gated = np.zeros(1, np.float32), np.zeros(8, np.float32)
    return timed(
        2000,
        lambda _: compute(block, starts, empty, starts, empty, 1, x, weight, y, gated, form),
    )


def elementwise() -> Spread:
    a = np.zeros((16, 128), np.float32)
    return timed(2000, lambda _: np.add(a, a, out=a))
