"""A device of FIFO queues in the place of CUDA's, which runs work as late as it may, or as early.

What is put on a stream runs when somebody waits for it, in the order of its stream and after the
events that the stream was told to wait for, and after nothing else. Streams named `greedy` run
theirs at once instead, as far as the events they wait for allow; with a `seed` any stream runs a
little whenever anything happens. So a missing wait shows: a copy that does not wait for the last
use of its slot overwrites weights that a lazy computation has not read yet, a computation that does
not wait for a landing reads what a lazy copy has not written.
Memory is full of NaN until written.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from oled.errors import UserError

STREAMS = ("compute", "copy", "out", "in")  # in the order in which each backend makes them


class LazyDevice:
    """`memory`: bytes of the device; `pinnable`: of the host that may be pinned."""

    def __init__(
        self,
        greedy: Collection[str] = (),
        *,
        seed: int | None = None,
        memory: int = 2**40,
        pinnable: int = 2**40,
        ignored: Callable[[LazyStream, LazyEvent], bool] = lambda stream, event: False,
    ) -> None:
        self.name = "lazy device"
        self.place = "cpu"
        self.lock = threading.RLock()
        self.greedy = frozenset(greedy)
        self._drawn = None if seed is None else random.Random(seed)
        self.ignored = ignored  # waits that are left out
        self.pinned: list[int] = []  # addresses
        self.jobs = 0
        self.waits = 0
        self._memory, self._pinnable = memory, pinnable
        self._streams: list[LazyStream] = []

    def enter(self) -> None:
        torch.set_num_threads(1)  # of this thread: products are the same in all of them

    def compute_stream(self) -> LazyStream:
        return self.stream()

    def stream(self) -> LazyStream:
        made = LazyStream(self, STREAMS[len(self._streams) % len(STREAMS)])
        self._streams.append(made)
        return made

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
        if size > self._memory:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes.\nmore text"
            )
        return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)

    def pin(self, block: np.ndarray[Any, Any]) -> None:
        if block.nbytes > self._pinnable:
            raise UserError("the host store can not be pinned: out of memory")
        self.pinned.append(block.ctypes.data)

    def unpin(self, block: np.ndarray[Any, Any]) -> None:
        self.pinned.remove(block.ctypes.data)

    def free_bytes(self) -> int:
        return self._memory

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.mark().wait()

    def captured(self, job: Callable[[], object]) -> Callable[[], object]:
        return job

    def trim(self) -> None:
        pass

    def run_greedy(self) -> None:
        """Everything that greedy streams may run by now."""
        if self._drawn is not None:
            for _ in range(self._drawn.randrange(4)):
                self._drawn.choice(self._streams).run_head()
        moved = True
        while moved:
            streams = [s for s in self._streams if s.name in self.greedy]
            moved = any(s.run_head() for s in streams)


class LazyStream:
    def __init__(self, device: LazyDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._queue: deque[Callable[[], object] | LazyEvent] = deque()

    def put(self, job: Callable[[], object]) -> None:
        self._append(job)

    def wait(self, event: LazyEvent) -> None:
        self._device.waits += 1
        if not self._device.ignored(self, event):
            self._append(event)

    def mark(self) -> LazyEvent:
        event = LazyEvent(self._device, self)
        self._append(event)
        return event

    def _append(self, item: Any) -> None:
        with self._device.lock:
            self._queue.append(item)
            self._device.run_greedy()

    def run_head(self) -> bool:
        """Run what is next; False where there is nothing, or another stream's event is missing."""
        if not self._queue:
            return False
        item = self._queue[0]
        if isinstance(item, LazyEvent):
            if item.stream is self:
                item.pass_by()
            elif not item.passed:
                return False
        self._queue.popleft()
        if not isinstance(item, LazyEvent):
            self._device.jobs += 1
            with torch.inference_mode():
                item()
        return True

    def run_until(self, event: LazyEvent) -> None:
        """No more than is needed for one of this stream's events."""
        while not event.passed:
            if self.run_head():
                continue
            missing = self._queue[0]
            assert isinstance(missing, LazyEvent)
            missing.stream.run_until(missing)


class LazyEvent:
    def __init__(self, device: LazyDevice, stream: LazyStream) -> None:
        self.stream = stream
        self.passed = False
        self._device = device
        self._ns = 0

    def pass_by(self) -> None:
        self.passed = True
        self._ns = time.perf_counter_ns()

    def done(self) -> bool:
        with self._device.lock:
            self._device.run_greedy()
            return self.passed

    def wait(self) -> None:
        with self._device.lock:
            self.stream.run_until(self)
            self._device.run_greedy()

    def ns_since(self, earlier: LazyEvent) -> int:
        assert self.passed
        assert earlier.passed
        return self._ns - earlier._ns
