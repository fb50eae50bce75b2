"""A machine without a GPU played by threads: one FIFO lane each for GPU, link and CPU workers.

Copies are real copies into a block of slots, experts are really computed, and each job lasts as
long as the profile says: it starts at its lane's last nominal end or when it was put, whichever is
later, does its work, sleeps until shortly before its deadline and watches the clock for the rest.
What one lane hands to another carries the *actual* time, so queueing and overlap are those of the
threads and not computed. Unpaced, jobs last as long as they last.

A slot's first number is NaN from the start of a copy until the moment of its landing: whoever
computes without waiting gets NaN.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from oled.live.backends import LayerWork, Piece, PrefetchFeed
from oled.live.backends.lanes import CPU, GPU, LINK, Lanes
from oled.live.backends.pacing import Job, Pacer, Rival, no_timer_slack
from oled.live.kernels import combine, compute, copy_poisoned, warm
from oled.live.store import HostStore
from oled.policies.interface import Costs
from oled.sim import lanes as ln
from oled.types import Floats, Ints

_NICE = {GPU: 4, CPU: 8}  # compute gives way to the lanes that keep time


class Emulated(Lanes[int]):
    """`costs` are the nominal times. A mark is the actual time, ns."""

    def __init__(self, store: HostStore, slots: int, costs: Costs, *, paced: bool) -> None:
        super().__init__(paced)
        self.store = store
        self.costs = costs
        self._nominal_work = np.zeros(4, np.int64)  # by lane: `oled.sim.lanes` GPU, H2D, ...
        self._device = np.zeros((max(1, slots), store.form.size), np.float32)
        self._y = np.zeros((0, store.form.hidden), np.float32)  # outputs of all pairs
        self._gated = {name: np.zeros(store.form.width, np.float32) for name in (GPU, CPU)}
        self._pacers = {name: Pacer(paced) for name in (GPU, LINK, CPU)}
        self._free_at = dict.fromkeys((GPU, LINK), 0)  # last nominal ends
        self._rivals = dict(zip((LINK, CPU), Rival.pair(costs.contention_ppm), strict=True))
        self._woken = 0  # since when there may be something to prefetch
        self._fetching: Job | None = None

    def open(self, prefetches: PrefetchFeed | None) -> None:
        warm()
        super().open(prefetches)
        self.start()

    def close(self) -> None:
        super().close()
        self._device = np.zeros((0, self.store.form.size), np.float32)

    def enter_lane(self, name: str) -> None:
        if self.paced:
            no_timer_slack()
            if name in _NICE:
                this = threading.get_native_id()
                nice = os.getpriority(os.PRIO_PROCESS, this) + _NICE[name]
                os.setpriority(os.PRIO_PROCESS, this, nice)

    def place(self, row: int, slot: int) -> None:
        self._device[slot] = self.store.block[row]

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

    def wake(self) -> None:
        self._woken = self.now
        super().wake()

    def vacated(self, mark: int) -> None:
        self._woken = mark
        super().wake()

    def wait(self, mark: int) -> None:
        """A mark is known when it has passed."""

    def take(self) -> tuple[int, Ints]:
        """Since the last call: the worst lateness of any lane against its own deadlines, and the
        nominal work that each lane was given, i64[4]; nanoseconds.
        """
        pacers = [self._host, *self._pacers.values()]
        worst = max(pacer.late_ns for pacer in pacers)
        for pacer in pacers:
            pacer.late_ns = 0
        work_ns, self._nominal_work = self._nominal_work, np.zeros(4, np.int64)
        return worst, work_ns

    def begin(self, work: LayerWork) -> int:
        pairs, used = work.pairs.size, int(work.starts[-1])
        if len(self._y) < pairs:
            self._y = np.zeros((pairs, self.store.form.hidden), np.float32)
        if used < pairs:  # outputs of unused slots are zero
            self._y[:pairs] = 0.0
        return self.now

    def end(self, work: LayerWork, marks: list[int]) -> Floats:
        self.now = max([self.now, *marks])
        out = np.empty((len(work.x), self.store.form.hidden), np.float32)
        combine(self._y[: work.pairs.size], work.top_k, out)
        return out

    def turn(self, cause: int) -> int:
        return max(self._free_at[GPU], cause)

    def landed_by(self, landed: int, turn: int) -> bool:
        return landed <= turn

    def group(self, work: LayerWork, chosen: Ints, turn: int, *, hits: bool) -> int:
        self._calculate(GPU, self._device, work.slot, work, chosen)
        costs = self.costs
        tokens = -(-int(work.count[chosen].sum()) // costs.top_k)
        nominal = int(costs.gpu_ns[costs.layer_class[work.layer], tokens, chosen.size])
        self._free_at[GPU] = turn + nominal
        self._nominal_work[ln.GPU] += nominal
        ended = self._pacers[GPU].until(turn + nominal)
        for position in chosen[work.prefetched[chosen]]:
            expert = int(work.row[position] - self.store.first[work.layer])
            self._log(ln.LOG_USE, turn, turn, work, expert)
        kind = ln.LOG_HITS if hits else ln.LOG_LANDED
        self._log(kind, turn, ended, work, chosen.size)
        return ended

    def copy(self, work: LayerWork, position: int, slot: int, vacant: int) -> int:
        row, target = int(work.row[position]), self._device[slot]
        source = self.store.block[row]
        copy_poisoned(source, target)
        nominal = int(self.costs.copy_ns[self.costs.layer_class[work.layer]])
        begin, ended = self._cross(self._crossing(max(work.begin, vacant), nominal))
        target[0] = source[0]
        expert = row - int(self.store.first[work.layer])
        self._log(ln.LOG_COPY, begin, ended, work, expert)
        return ended

    def fetch(self, piece: Piece) -> int:
        source, target = self.store.block[piece.row], self._device[piece.slot]
        copy_poisoned(source[: piece.last], target[: piece.last], piece.first)
        self._fetching = self._crossing(self._woken, piece.nominal_ns)
        begin, ended = self._cross(self._fetching)
        if piece.last == source.size:
            target[0] = source[0]
        expert = piece.row - int(self.store.first[piece.layer])
        self.entries.append((ln.LOG_PREFETCH, begin, ended, piece.forward, piece.layer, expert))
        return ended

    def fetched(self) -> None:
        self._fetching = None

    def settle(self) -> None:
        now = self.now
        while (job := self._fetching) is not None and job.earliest_end(now) <= now:
            time.sleep(0)  # the link's thread is about to say so

    def _crossing(self, cause: int, nominal_ns: int) -> Job:
        """The link begins a copy."""
        free_at = self._free_at[LINK]
        start = max(free_at, cause)
        nominal_ns += self.costs.copy_wake_ns if start > free_at else 0
        return self._rivals[LINK].begin(start, nominal_ns)

    def _cross(self, job: Job) -> tuple[int, int]:
        """Begin and actual end of a copy."""
        ended, self._free_at[LINK] = self._pacers[LINK].finish(job)
        self._nominal_work[ln.H2D] += self._free_at[LINK] - job.start_ns
        return job.start_ns, ended

    def copy_back(self, work: LayerWork, slot: int, row: int, cause: int) -> int:
        self.store.block[row] = self._device[slot]
        layer = int(np.searchsorted(self.store.first, row, side="right")) - 1
        nominal = int(self.costs.copy_out_ns[self.costs.layer_class[layer]])
        self._nominal_work[ln.D2H] += nominal
        ended = self._host.until(cause + nominal)
        expert = row - int(self.store.first[layer])
        self.entries.append((ln.LOG_BACK, cause, ended, work.forward, layer, expert))
        return ended

    def compute_on_host(self, work: LayerWork, cause: int) -> int:
        costs = self.costs
        counts = work.count[work.on_cpu]
        tokens = min(int(counts.sum()), work.tokens)
        called = costs.cpu_call_ns + int(costs.cpu_ns[costs.layer_class[work.layer]][counts].sum())
        begin, back_ns = cause + int(costs.act_out_ns[tokens]), int(costs.act_back_ns[tokens])
        job = self._rivals[CPU].begin(begin, called)
        self._calculate(CPU, self.store.block, work.row, work, work.on_cpu)
        done, nominal = self._pacers[CPU].finish(job)
        self._nominal_work[ln.D2H] += begin - cause
        self._nominal_work[ln.CPU] += nominal - begin
        self._log(ln.LOG_OUT, cause, begin, work, tokens)
        self._log(ln.LOG_CPU, begin, done, work, len(counts))
        return self._pacers[CPU].until(nominal + back_ns)

    def _log(self, kind: int, begin: int, end: int, work: LayerWork, item: int) -> None:
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
            self.store.form,
        )
