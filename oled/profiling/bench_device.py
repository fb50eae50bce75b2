"""A device and its host, one call at a time: what `backend=cuda` costs.

Times on the device are between events. Weights are read cold: slots and rows in turn, of more than
any cache holds. Never run on a real device yet; see `oled.live.backends.cuda`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oled.hardware.this_machine import gpu_facts, machine
from oled.live.backends import products
from oled.live.backends.cpu_worker import CpuWay, CpuWorker, fastest_way
from oled.live.backends.device import Device, Stream
from oled.live.kernels import SILU, ExpertForm
from oled.live.store import NUMBERS, HostStore
from oled.models.catalogue import ModelGeometry
from oled.profiling.bench import Spread, Together, hand_off, timed
from oled.profiling.bench_dense import Dense

_GIB = 2**30
_REPEATS = 20
_BUDGET_NS = 300_000_000


class DeviceBench:
    """See `oled.profiling.bench.Bench`. `block`: bytes of experts on a side; `big`: of peak."""

    def __init__(
        self,
        model: ModelGeometry,
        device: Device,
        *,
        numbers: str = "bfloat16",
        block: int = _GIB,
        big: int = 4096,
        warm_s: float = 1.0,
    ) -> None:
        self.backend = "cuda"
        self.device = self.gpu = device.name
        self.numbers = NUMBERS[numbers]
        self.facts = machine()
        self.absent: dict[str, str] = {}
        width = model.moe_intermediate_size
        self.form = ExpertForm(model.hidden_size, width, False, False, SILU, 0.0, 0.0)
        self._device, self._big, self._warm_s, self._block = device, big, warm_s, block
        self._dtype = products.DTYPES[numbers]
        self._rows = max(8, block // (self.form.size * self.numbers.bytes))
        self._store = HostStore.random(self.form, np.array([self._rows]), numbers=self.numbers)
        self._experts = torch.from_numpy(self._store.block).view(self._dtype)
        self._slots = device.tensor((self._rows, self.form.size), self._dtype)
        device.pin(self._store.block)
        self._compute, self._link = device.compute_stream(), device.stream()
        self._way = fastest_way(self.form, self._experts)
        self.cpu_threads = self._way.threads
        self.facts["cpu_experts"] = f"{self._way.name(self._dtype)}, {self.cpu_threads} threads"
        self._dense = Dense(device.place, numbers, self._captured)

    def warm(self) -> None:
        """The block is copied once, which slots must hold, and products keep the clocks up."""
        self._link.put(lambda: self._slots.copy_(self._experts, non_blocking=True))
        self._link.mark().wait()
        self.facts |= gpu_facts()  # while the link is awake
        if "driver" not in self.facts:
            self.absent["driver, link generation and width"] = "nvidia-smi does not tell"
        until = time.perf_counter() + self._warm_s
        while time.perf_counter() < until:
            self.peak()

    def close(self) -> None:
        self._device.synchronize()
        self._device.unpin(self._store.block)
        self._slots = torch.empty(0)
        self._device.trim()

    def _events(self, stream: Stream, job: Callable[[int], Any], *, queued: bool) -> Spread:
        """Device times of `job(turn)`: one behind the other, or each on an idle device."""
        times: list[float] = []
        stream.put(lambda: job(0))
        stream.mark().wait()
        began = time.perf_counter_ns()
        while len(times) < 200 and (len(times) < 5 or time.perf_counter_ns() - began < _BUDGET_NS):
            turns = range(len(times), len(times) + (_REPEATS if queued else 1))
            marks = [stream.mark()]
            for turn in turns:
                stream.put(lambda turn=turn: job(turn))  # type: ignore[misc]
                marks.append(stream.mark())
            marks[-1].wait()
            times += [b.ns_since(a) for a, b in pairwise(marks)]
        return Spread.of(times)

    def _captured(self, job: Callable[[int], Any]) -> Spread:
        """Kernels only: the job as one launch."""
        replay = self._device.captured(lambda: job(0))
        return self._events(self._compute, lambda _: replay(), queued=True)

    def copy(self, size: int, *, inward: bool, pinned: bool) -> Spread:
        return self._events(self._link, self._copying(size, inward, pinned), queued=True)

    def copy_alone(self, size: int, *, pinned: bool) -> Spread:
        return self._events(self._link, self._copying(size, True, pinned), queued=False)

    def _copying(self, size: int, inward: bool, pinned: bool) -> Callable[[int], Any]:
        """Copies of `size` bytes, each of another place."""
        count = size // self.numbers.bytes
        device, host = self._slots.view(-1), self._experts.view(-1)
        if not pinned:
            host = torch.empty(min(len(host), max(count, 2**25)), dtype=self._dtype).fill_(1)
        rooms = min(len(host), len(device)) - count + 1

        def copy(turn: int) -> Tensor:
            at = (turn * count) % rooms
            ends = device[at : at + count], host[at : at + count]
            target, source = ends if inward else ends[::-1]
            return target.copy_(source, non_blocking=True)

        return copy

    def pieces(self, count: int) -> Spread:
        copy = self._copying(self._store.expert_bytes // count, True, True)

        def whole(turn: int) -> None:
            for i in range(count):
                self._link.put(lambda i=i: copy(count * turn + i))  # type: ignore[misc]
            self._link.mark().wait()

        return timed(whole, 100)

    def group(self, active: int, tokens: int, top_k: int) -> Spread:
        counts = np.bincount(np.arange(tokens * top_k) % active).tolist()
        pairs, hidden = tokens * top_k, self.form.hidden
        x, y = (self._device.tensor((pairs, hidden), self._dtype) for _ in range(2))
        between = self._device.tensor((pairs, 2 * self.form.width), self._dtype)
        self._compute.put(lambda: x.fill_(0.5))

        def call(turn: int) -> None:
            rows = [self._slots[(turn * active + i) % self._rows] for i in range(active)]
            products.compute(rows, counts, x, between, y, self.form)

        return self._events(self._compute, call, queued=False)

    def cpu_expert(self, tokens: int, threads: int) -> Spread:
        return timed(self._on_cpu(tokens, threads), 100)

    def _on_cpu(self, tokens: int, threads: int) -> Callable[[int], Any]:
        worker = CpuWorker(self.form, self._dtype, CpuWay(self._way.widened, threads))
        worker.enter()
        x = torch.full((tokens, self.form.hidden), 0.5, dtype=self._dtype)
        out = torch.empty_like(x)

        def compute(turn: int) -> None:
            worker.compute([self._experts[turn % self._rows]], [tokens], x, out)

        return compute

    def together(self) -> Together:
        """CPU experts while a queue of copies runs, and these copies."""
        computing = self._on_cpu(4, self.cpu_threads)
        copying = self._copying(self._store.expert_bytes, True, True)
        cpu_alone = timed(computing, 50)
        copy_alone = self._events(self._link, copying, queued=True)
        copies = max(_REPEATS, round(20 * cpu_alone.value / copy_alone.value))
        marks = [self._link.mark()]
        for turn in range(copies):
            self._link.put(lambda turn=turn: copying(turn))  # type: ignore[misc]
            marks.append(self._link.mark())
        times: list[float] = []
        while not times or not marks[-1].done():
            before = time.perf_counter_ns()
            computing(len(times))
            times.append(time.perf_counter_ns() - before)
            if len(times) == 10 * _REPEATS:
                break
        marks[-1].wait()
        copy_beside = [b.ns_since(a) for a, b in pairwise(marks)]
        return Together(cpu_alone, Spread.of(times), copy_alone, Spread.of(copy_beside))

    def lanes_beside(self) -> dict[str, float]:
        return {}

    def dense_layer(self, model: ModelGeometry, tokens: int, context: int) -> Spread:
        return self._dense.layer(model, tokens, context)

    def head(self, model: ModelGeometry, tokens: int) -> Spread:
        return self._dense.head(model, tokens)

    def elementwise(self) -> Spread:
        return self._dense.elementwise()

    def calls(self) -> dict[str, Spread]:
        copy, x = self._copying(4096, True, True), self._device.tensor((16, 128), self._dtype)

        def kernel(_: int) -> None:
            self._compute.put(lambda: x.mul_(1.0))

        def synchronised(turn: int) -> None:
            kernel(turn)
            self._compute.mark().wait()

        put = timed(lambda turn: self._link.put(lambda: copy(turn)), 200)
        self._device.synchronize()
        launch = timed(kernel, 200)
        self._device.synchronize()
        return {"copy": put, "launch": launch, "sync": timed(synchronised, 200)}

    def crossing(self, size: int) -> Spread:
        count = size // self.numbers.bytes
        host, device = self._experts.view(-1)[:count], self._slots.view(-1)[:count]

        def there_and_back(_: int) -> None:
            self._link.put(lambda: host.copy_(device, non_blocking=True))
            self._link.mark().wait()
            self._link.put(lambda: device.copy_(host, non_blocking=True))
            self._link.mark().wait()

        return timed(there_and_back, 200)

    def cpu_call(self) -> Spread:
        worker = CpuWorker(self.form, self._dtype, self._way)
        none = torch.empty(0, self.form.hidden, dtype=self._dtype)
        return hand_off() + timed(lambda _: worker.compute([], [], none, none))

    def peak(self) -> tuple[int, Spread]:
        n = self._big
        a, b, out = (self._device.tensor((n, n), self._dtype) for _ in range(3))
        self._compute.put(lambda: (a.fill_(0.5), b.fill_(0.5)))
        return 2 * n**3, self._events(
            self._compute, lambda _: torch.mm(a, b, out=out), queued=False
        )

    def device_stream(self) -> tuple[int, Spread]:
        half = self._rows // 2
        source, target = self._slots[:half], self._slots[half : 2 * half]
        size = 2 * source.nbytes
        return size, self._events(self._compute, lambda _: target.copy_(source), queued=True)

    def host_stream(self) -> tuple[int, Spread]:
        source = torch.ones(self._block // 4, dtype=torch.float32)
        target = torch.empty_like(source)
        before = torch.get_num_threads()
        torch.set_num_threads(self.cpu_threads)
        try:
            return 2 * source.nbytes, timed(lambda _: target.copy_(source), 12)
        finally:
            torch.set_num_threads(before)
