"""Lanes without a device: threads copy experts into slots in memory and compute them.

A mark is the actual time, ns. The `*_span` methods, which subclasses define, give each job its
begin and its end; they are called when the job's real work, which started at `began`, is done.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

import numpy as np

from oled.live.backends import LayerWork, Piece, PrefetchFeed
from oled.live.backends.host_experts import HostExperts
from oled.live.backends.lanes import CPU, GPU, LINK, Lanes
from oled.live.backends.pacing import Pacer
from oled.live.kernels import ExpertForm, combine, compute, warm
from oled.live.store import Store, page_aligned
from oled.policies.interface import Costs
from oled.sim import lanes as ln
from oled.types import Floats, Ints

Span = tuple[int, int]
"""Begin and actual end of a job, ns."""


class ThreadLanes(Lanes[int]):
    """Slots in memory, and the arithmetic and copies of the lanes."""

    def __init__(
        self, store: Store, experts: HostExperts, slots: int, costs: Costs, *, paced: bool
    ) -> None:
        super().__init__(paced)
        self.store = store
        self.costs = costs
        self._form: ExpertForm = store.form
        self._experts = experts
        self._count = max(1, slots)
        self._device: Floats = np.zeros((0, 0), np.float32)  # [slots, numbers of a slot]
        self._y = np.zeros((0, store.form.hidden), np.float32)  # outputs of all pairs
        self._gated = {name: np.zeros(store.form.width, np.float32) for name in (GPU, CPU)}
        self._pacers = {name: Pacer(paced) for name in (GPU, LINK, CPU)}
        self._work_ns = np.zeros(4, np.int64)  # by lane: `oled.sim.lanes` GPU, H2D, ...

    @abstractmethod
    def group_span(self, work: LayerWork, chosen: Ints, turn: int, began: int) -> Span:
        """Return the time of a launch group."""

    @abstractmethod
    def copy_span(self, cause: int, nominal_ns: int, began: int) -> Span:
        """Return the time of a copy on the link that could begin at `cause`."""

    @abstractmethod
    def fetch_span(self, piece: Piece, began: int) -> Span:
        """Return the time of a piece of a prefetch."""

    @abstractmethod
    def copy_back_span(self, cause: int, nominal_ns: int, began: int) -> Span:
        """Return the time of a copy to the host that could begin at `cause`."""

    def open(self, prefetches: PrefetchFeed | None) -> None:
        warm()
        self._experts.open(self._count)
        numbers = self._experts.slot_numbers
        memory = page_aligned(self._count * numbers * 4).view(np.float32)
        memory[:] = 0.0  # no page is mapped while time counts
        self._device = memory.reshape(self._count, numbers)
        super().open(prefetches)
        self.start()

    def close(self) -> None:
        super().close()
        self._experts.close()
        self._device = np.zeros((0, 0), np.float32)

    def place(self, row: int, slot: int) -> None:
        self._experts.copy(row, slot, self._device[slot], 0, self._form.size)
        self._experts.land(row, slot, self._device[slot])

    def adopt(self, values: Any) -> Floats:
        adopted: Floats = np.ascontiguousarray(values, np.float32)
        return adopted

    def read(self, values: Floats) -> Floats:
        return values

    def start(self) -> None:
        self.now = time.perf_counter_ns()

    def catch_up(self, forward: int, layer: int) -> None:
        begin, self.now = self.now, time.perf_counter_ns()
        self.entries.append((ln.LOG_DENSE, begin, self.now, forward, layer, 0))

    def wait(self, mark: int) -> None:
        """A mark is known when it has passed."""

    def take(self) -> tuple[int, Ints]:
        pacers = [self._host, *self._pacers.values()]
        worst = max(pacer.late_ns for pacer in pacers)
        for pacer in pacers:
            pacer.late_ns = 0
        work_ns, self._work_ns = self._work_ns, np.zeros(4, np.int64)
        return worst, work_ns

    def begin(self, work: LayerWork) -> int:
        pairs, used = work.pairs.size, int(work.starts[-1])
        if len(self._y) < pairs:
            self._y = np.zeros((pairs, self._form.hidden), np.float32)
        if used < pairs:  # outputs of unused slots are zero
            self._y[:pairs] = 0.0
        return self.now

    def end(self, work: LayerWork, marks: list[int]) -> Floats:
        self.now = max([self.now, *marks])
        out = np.empty((len(work.x), self._form.hidden), np.float32)
        combine(self._y[: work.pairs.size], work.top_k, out)
        return out

    def landed_by(self, landed: int, turn: int) -> bool:
        return landed <= turn

    def group(self, work: LayerWork, chosen: Ints, turn: int, *, hits: bool) -> int:
        began = time.perf_counter_ns()
        self._calculate(GPU, self._device, work.slot, work, chosen)
        begin, ended = self.group_span(work, chosen, turn, began)
        for position in chosen[work.prefetched[chosen]]:
            expert = int(work.row[position] - self.store.first[work.layer])
            self.log(ln.LOG_USE, begin, begin, work, expert)
        kind = ln.LOG_HITS if hits else ln.LOG_LANDED
        self.log(kind, begin, ended, work, chosen.size)
        return ended

    def copy(self, work: LayerWork, position: int, slot: int, vacant: int) -> int:
        row, target, began = int(work.row[position]), self._device[slot], time.perf_counter_ns()
        self._experts.copy(row, slot, target, 0, self._form.size)
        nominal = int(self.costs.copy_ns[self.costs.layer_class[work.layer]])
        begin, ended = self.copy_span(max(work.begin, vacant), nominal, began)
        self._experts.land(row, slot, target)
        expert = row - int(self.store.first[work.layer])
        self.log(ln.LOG_COPY, begin, ended, work, expert)
        return ended

    def fetch(self, piece: Piece) -> int:
        row, target, began = piece.row, self._device[piece.slot], time.perf_counter_ns()
        self._experts.copy(row, piece.slot, target, piece.first, piece.last)
        begin, ended = self.fetch_span(piece, began)
        if piece.last == self._form.size:
            self._experts.land(row, piece.slot, target)
        expert = row - int(self.store.first[piece.layer])
        self.entries.append((ln.LOG_PREFETCH, begin, ended, piece.forward, piece.layer, expert))
        return ended

    def copy_back(self, work: LayerWork, slot: int, row: int, cause: int) -> int:
        began = time.perf_counter_ns()
        self._experts.copy_back(row, self._device[slot])
        layer = int(np.searchsorted(self.store.first, row, side="right")) - 1
        nominal = int(self.costs.copy_out_ns[self.costs.layer_class[layer]])
        begin, ended = self.copy_back_span(cause, nominal, began)
        expert = row - int(self.store.first[layer])
        self.entries.append((ln.LOG_BACK, begin, ended, work.forward, layer, expert))
        return ended

    def compute_batches(self, work: LayerWork) -> None:
        """Compute the experts of the CPU lane."""
        for block, row, chosen in self._experts.batches(work.row, work.on_cpu):
            self._calculate(CPU, block, row, work, chosen)

    def log(self, kind: int, begin: int, end: int, work: LayerWork, item: int) -> None:
        self.entries.append((kind, begin, end, work.forward, work.layer, item))

    def _calculate(
        self, lane: str, block: Floats, row: Ints, work: LayerWork, chosen: Ints
    ) -> None:
        compute(
            block,
            row,
            chosen,
            work.starts,
            work.pairs,
            work.top_k,
            work.x,
            work.weight,
            self._y,
            self._gated[lane],
            self._form,
        )
