"""A CUDA device: experts copied on one stream, computed on another, with events both ways.

Never run on a device yet: its order of work is proved with a device of FIFO queues
(tests/live/lazy_device.py), its arithmetic on the CPU.

Three rules order the streams, whoever asks for a copy: a copy into a slot waits for the last use
of that slot, a launch group waits for the last copy into each of its slots, and the sum of a step
waits for the outputs of the CPU. The lanes' threads only put work on streams; they wait for the
device where the simulator's lanes do: before a landed group is put together (GPU), for activations
(CPU), and for a prefetch (link), so that copies on demand may overtake what is not begun.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oled.live.backends import LayerWork, Piece, PrefetchFeed
from oled.live.backends.cpu_worker import CpuWay, CpuWorker, fastest_way
from oled.live.backends.device import Device, Event, device_failures
from oled.live.backends.event_log import EventLog
from oled.live.backends.kind import Kind
from oled.live.backends.lanes import CPU, Lanes
from oled.live.backends.products import DTYPES
from oled.live.backends.room import Room
from oled.live.kernels import ExpertForm
from oled.live.store import HostStore
from oled.policies.interface import Costs
from oled.sim import lanes as ln
from oled.types import Floats, Ints

log = logging.getLogger("oled")

_SAMPLE = 64  # experts that the CPU's ways are timed with
_TOLERANCE = 0.02
"""Of the largest output: the CPU sums in another order, and rounds to bfloat16 elsewhere."""


def cuda_kind(device: Device, cpu_way: CpuWay | None = None) -> Kind[HostStore]:
    """The backend on this device. How experts are computed on the CPU is found out once."""
    ways: dict[tuple[ExpertForm, str], CpuWay] = {}

    def way(store: HostStore) -> CpuWay:
        key = store.form, store.numbers.name
        if key not in ways:
            ways[key] = cpu_way or fastest_way(store.form, tensor_of(store)[:_SAMPLE])
            name = ways[key].name(DTYPES[store.numbers.name])
            log.info("CPU experts in %s, %d threads", name, ways[key].threads)
        return ways[key]

    def make(store: HostStore, slots: int, costs: Costs, paced: bool) -> Cuda:
        return Cuda(store, slots, device, way(store), paced=paced)

    @contextmanager
    def held(store: HostStore) -> Iterator[None]:
        device.pin(store.block)
        try:
            yield
        finally:
            device.unpin(store.block)

    return Kind(
        name="cuda",
        machine=device.name,
        device=device.place,
        numbers=("bfloat16", "float16", "float32"),
        tolerance=_TOLERANCE,
        keeps_time=False,
        pins=True,
        device_free=device.free_bytes,
        random=HostStore.random,
        make=make,
        held=held,
        failures=device_failures,
    )


def tensor_of(store: HostStore) -> Tensor:
    """The store's block [R, S] as torch has it."""
    return torch.from_numpy(store.block).view(DTYPES[store.numbers.name])


class Cuda(Lanes[Event]):
    """A mark is an event. `paced`: dense parts and heads that are not computed last as long as
    asked, and every step is waited for, so that times are those of layer-steps.
    """

    def __init__(
        self,
        store: HostStore,
        slots: int,
        device: Device,
        cpu_way: CpuWay,
        *,
        paced: bool,
    ) -> None:
        super().__init__(paced)
        self.store = store
        self._device = device
        self._dtype = DTYPES[store.numbers.name]
        self._experts = tensor_of(store)  # [R, S]
        self._worker = CpuWorker(store.form, self._dtype, cpu_way)
        self._count = max(1, slots)
        self._slots = torch.empty(0)  # [slots, S]
        self._pinned = False
        self._landed: dict[int, Event] = {}  # last copy into a slot that compute has not awaited
        self._used: dict[int, Event] = {}  # last use of a slot
        self._rows: Ints = np.zeros(0, np.int64)  # first row of each position of the step
        self._room = Room(self._device, store.form, self._dtype)
        self._computing = self._device.compute_stream()
        self._copying, self._outward, self._inward = (self._device.stream() for _ in range(3))
        self._log = EventLog(self._computing, self.entries)
        self._ended = self._grouped = self._computing.mark()

    def open(self, prefetches: PrefetchFeed | None) -> None:
        try:
            with device_failures():
                self._prepare()
            super().open(prefetches)
            self.start()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        self._slots = self._device.tensor((self._count, self.store.form.size), self._dtype)
        self._device.pin(self.store.block)
        self._pinned = True

    def close(self) -> None:
        super().close()
        try:
            self._device.synchronize()
        finally:
            if self._pinned:
                self._pinned = False
                self._device.unpin(self.store.block)
            self._slots = torch.empty(0)
            self._room.empty()
            self._device.trim()

    def enter_lane(self, name: str) -> None:
        self._device.enter()
        if name == CPU:
            self._worker.enter()

    def place(self, row: int, slot: int) -> None:
        self._copy(slot, row, slice(None))

    def adopt(self, values: Any) -> Tensor:
        given = torch.as_tensor(values)
        adopted = self._device.tensor(tuple(given.shape), given.dtype)
        self._computing.put(lambda: adopted.copy_(given))
        return adopted

    def read(self, values: Tensor) -> Floats:
        self._computing.mark().wait()
        read: Floats = values.float().cpu().numpy()
        return read

    def start(self) -> None:
        self._device.synchronize()
        self.now = time.perf_counter_ns()

    def catch_up(self, forward: int, layer: int) -> None:
        until = self._computing.mark()
        self._log.add(ln.LOG_DENSE, self._ended, until, (forward, layer), 0)
        until.wait()
        self.now = time.perf_counter_ns()

    def wait(self, mark: Event) -> None:
        mark.wait()

    def take(self) -> tuple[int, Ints]:
        """Since the last call: the worst lateness of a host section against its deadline, and the
        time that each lane worked, i64[4]; nanoseconds.
        """
        self._ended.wait()
        self._log.settle(self._ended)
        late, self._host.late_ns = self._host.late_ns, 0
        return late, self._log.take()

    def begin(self, work: LayerWork) -> Event:
        self._ended.wait()  # nobody uses the room any more
        self._log.settle(self._ended)
        order = np.concatenate([work.hits, work.late, work.transfers, work.on_cpu])
        counts = np.diff(work.starts)[order]
        self._rows = np.zeros(len(order), np.int64)
        self._rows[order] = np.cumsum(counts) - counts
        pairs = [work.pairs[work.starts[i] : work.starts[i + 1]] for i in order]
        self._computing.put(
            self._room.gather(np.concatenate([work.pairs[:0], *pairs]), work.x, work.top_k)
        )
        return self._computing.mark()

    def end(self, work: LayerWork, marks: list[Event]) -> Tensor:
        for mark in marks:
            self._computing.wait(mark)
        out = self._device.tensor(tuple(work.x.shape), work.x.dtype)
        self._computing.put(self._room.add(work.weight, work.top_k, out))
        self._ended = self._computing.mark()
        if self.paced:
            self._ended.wait()
            self.now = time.perf_counter_ns()
        return out

    def turn(self, cause: Event) -> Event:
        self._grouped.wait()
        return cause

    def landed_by(self, landed: Event, turn: Event) -> bool:
        return landed.done()

    def group(self, work: LayerWork, chosen: Ints, turn: Event, *, hits: bool) -> Event:
        stream, slots = self._computing, work.slot[chosen].tolist()
        for slot in slots:
            landed = self._landed.pop(slot, None)
            if landed is not None:
                stream.wait(landed)
        begin = stream.mark()
        experts = [self._slots[slot] for slot in slots]
        stream.put(self._room.compute(experts, *self._rows_of(work, chosen)))
        ended = self._grouped = stream.mark()
        for slot in slots:
            self._used[slot] = ended
        kind = ln.LOG_HITS if hits else ln.LOG_LANDED
        self._log.add(kind, begin, ended, (work.forward, work.layer), chosen.size)
        return ended

    def copy(self, work: LayerWork, position: int, slot: int, vacant: Event) -> Event:
        row = int(work.row[position])
        begin, landed = self._copy(slot, row, slice(None))
        expert = row - int(self.store.first[work.layer])
        self._log.add(ln.LOG_COPY, begin, landed, (work.forward, work.layer), expert)
        return landed

    def fetch(self, piece: Piece) -> Event:
        begin, crossed = self._copy(piece.slot, piece.row, slice(piece.first, piece.last))
        expert = piece.row - int(self.store.first[piece.layer])
        self._log.add(ln.LOG_PREFETCH, begin, crossed, (piece.forward, piece.layer), expert)
        crossed.wait()
        return crossed

    def _copy(self, slot: int, row: int, part: slice) -> tuple[Event, Event]:
        """Copy a part of an expert into a slot once nobody reads it; when it begins and ends."""
        if slot in self._used:
            self._copying.wait(self._used[slot])
        source, target = self._experts[row, part], self._slots[slot, part]
        begin = self._copying.mark()
        self._copying.put(lambda: target.copy_(source, non_blocking=True))
        landed = self._landed[slot] = self._copying.mark()
        return begin, landed

    def copy_back(self, work: LayerWork, slot: int, row: int, cause: Event) -> Event:
        stream, source, target = self._outward, self._slots[slot], self._experts[row]
        stream.wait(cause)
        begin = stream.mark()
        stream.put(lambda: target.copy_(source, non_blocking=True))
        ended = stream.mark()
        expert = row - int(self.store.first[work.layer])
        self._log.add(ln.LOG_BACK, begin, ended, (work.forward, work.layer), expert)
        return ended

    def compute_on_host(self, work: LayerWork, cause: Event) -> Event:
        room, where = self._room, (work.forward, work.layer)
        self._outward.wait(cause)
        begin = self._outward.mark()
        self._outward.put(room.activations_out(work.x))
        out = self._outward.mark()
        self._log.add(ln.LOG_OUT, begin, out, where, len(work.x))
        out.wait()
        began = time.perf_counter_ns()
        experts = [self._experts[row] for row in work.row[work.on_cpu].tolist()]
        first, counts = self._rows_of(work, work.on_cpu)
        x, y = room.on_host(first[0], sum(counts), work.top_k)
        self._worker.compute(experts, counts, x, y)
        ended = time.perf_counter_ns()
        self.entries.append((ln.LOG_CPU, began, ended, *where, len(counts)))
        self._inward.put(room.outputs_in(first[0], sum(counts)))
        return self._inward.mark()

    def _rows_of(self, work: LayerWork, chosen: Ints) -> tuple[list[int], list[int]]:
        """First row and number of rows of each position."""
        return self._rows[chosen].tolist(), np.diff(work.starts)[chosen].tolist()
