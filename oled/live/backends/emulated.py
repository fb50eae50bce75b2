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

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from oled.live.backends import LaneError, LayerWork
from oled.live.backends.pacing import Pacer, no_timer_slack
from oled.live.kernels import Ints, compute, copy_poisoned, warm
from oled.live.store import HostStore
from oled.policies.interface import Costs
from oled.sim import lanes as ln

SILENCE_S = 60.0  # without an answer of any lane
_SWITCH_S = 5e-5  # longest time that a thread keeps the interpreter
_NICE = {"gpu": 4, "cpu": 8}  # compute gives way to the lanes that keep time

GPU, LINK, CPU = "gpu", "link", "cpu"


class _StoppedError(Exception):
    """Another lane failed, or the run is over."""


class Emulated:
    """`costs` are the nominal times; contention between CPU and link is not put in."""

    def __init__(self, store: HostStore, slots: int, costs: Costs, *, paced: bool) -> None:
        self.store = store
        self.costs = costs
        self.paced = paced
        self.now = 0  # the actual end of the last section or step
        self.entries: list[tuple[int, ...]] = []  # as in `oled.sim.timeline.Timeline`
        self._given = np.zeros(4, np.int64)  # nominal work by lane: `oled.sim.lanes` GPU, H2D, ...
        self._device = np.zeros((max(1, slots), store.form.size), np.float32)
        self._host = Pacer(paced)
        self._jobs: dict[str, SimpleQueue[LayerWork | None]] = {}
        self._pacers = {name: Pacer(paced) for name in (GPU, LINK, CPU)}
        self._free_at = dict.fromkeys((GPU, LINK), 0)  # last nominal ends
        self._done: SimpleQueue[tuple[str, int, BaseException | None]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: LayerWork | None = None
        self._restore: tuple[float, bool] | None = None

    def open(self) -> None:
        warm()
        if self.paced:
            self._restore = (sys.getswitchinterval(), gc.isenabled())
            sys.setswitchinterval(_SWITCH_S)
            gc.disable()
            no_timer_slack()
        for name, job in ((GPU, self._compute), (LINK, self._copy), (CPU, self._compute_on_host)):
            self._jobs[name] = SimpleQueue()
            thread = threading.Thread(target=self._lane, args=(name, job), name=f"oled-{name}")
            thread.daemon = True
            self._threads.append(thread)
            thread.start()
        self.now = time.perf_counter_ns()

    def close(self) -> None:
        if self._running is not None:
            self._stop(self._running)
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._jobs.clear()
        self._threads.clear()
        if self._restore is not None:
            switch, collecting = self._restore
            sys.setswitchinterval(switch)
            if collecting:
                gc.enable()
            self._restore = None
        self._device = np.zeros((0, self.store.form.size), np.float32)

    def place(self, row: int, slot: int) -> None:
        self._device[slot] = self.store.block[row]

    def host(self, nominal_ns: int) -> None:
        self.now = self._host.until(self.now + nominal_ns)

    def catch_up(self) -> None:
        self.now = time.perf_counter_ns()

    def take(self) -> tuple[int, Ints]:
        """Since the last call: the worst lateness of any lane against its own deadlines, and the
        nominal work that each lane was given, i64[4]; nanoseconds.
        """
        pacers = [self._host, *self._pacers.values()]
        worst = max(pacer.late_ns for pacer in pacers)
        for pacer in pacers:
            pacer.late_ns = 0
        given, self._given = self._given, np.zeros(4, np.int64)
        return worst, given

    def run(self, work: LayerWork) -> None:
        work.begin_ns = self.now
        for slot in work.free:
            work.vacant.put((self.now, slot))
        lanes = []
        if work.hits.size or work.transfers.size:
            lanes.append(GPU)
        if work.transfers.size:
            lanes.append(LINK)
        if work.on_cpu.size:
            lanes.append(CPU)
        self._running = work
        for name in lanes:
            self._jobs[name].put(work)
        failure: tuple[str, BaseException] | None = None
        ended = self.now
        for _ in lanes:
            try:
                name, stamp, error = self._done.get(timeout=SILENCE_S)
            except Empty:
                raise LaneError(f"no lane has answered for {SILENCE_S:g} s") from None
            ended = max(ended, stamp)
            if error is not None and (failure is None or isinstance(failure[1], _StoppedError)):
                failure = (name, error)
        self._running = None
        if failure is not None:
            raise LaneError(f"the {failure[0]} lane failed: {failure[1]!r}") from failure[1]
        self.now = ended

    def _lane(self, name: str, job: Callable[[LayerWork, Pacer], int]) -> None:
        if self.paced:
            no_timer_slack()
            if name in _NICE:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE[name])
        while (work := self._jobs[name].get()) is not None:
            try:
                self._done.put((name, job(work, self._pacers[name]), None))
            except BaseException as error:  # whatever it is, the main thread must hear of it
                self._stop(work)
                self._done.put((name, 0, error))

    def _stop(self, work: LayerWork) -> None:
        """Wake the lanes that wait for one another."""
        for _ in range(2):
            work.landed.put(None)
            work.vacant.put(None)

    def _log(self, kind: int, begin: int, end: int, work: LayerWork, item: int) -> None:
        self.entries.append((kind, begin, end, work.forward, work.layer, item))

    def _compute(self, work: LayerWork, pacer: Pacer) -> int:
        """The GPU: hits as one group, then whenever it is free all that have landed."""
        gated = np.zeros(self.store.form.width, np.float32)
        ended = work.begin_ns
        if work.hits.size:
            ended = self._group(work, work.hits, max(self._free_at[GPU], ended), gated, pacer, True)
        for slot in work.released:
            work.vacant.put((ended, slot))
        left, held = work.transfers.size, None
        while left:
            stamp, first = held or _get(work.landed)
            held, group = None, [first]
            start = max(self._free_at[GPU], stamp)
            while len(group) < left and held is None:
                try:
                    item = work.landed.get_nowait()
                except Empty:
                    break
                if item is None:
                    raise _StoppedError
                if item[0] > start:  # landed after this group began
                    held = item
                else:
                    group.append(item[1])
            ended = self._group(work, np.array(group), start, gated, pacer, False)
            for position in group:
                if not work.stays[position]:
                    work.vacant.put((ended, int(work.slot[position])))
            left -= len(group)
        return ended

    def _group(
        self,
        work: LayerWork,
        chosen: Ints,
        start: int,
        gated: Any,
        pacer: Pacer,
        hits: bool,
    ) -> int:
        """One launch group; returns its actual end."""
        self._calculate(self._device, work.slot, work, chosen, gated)
        costs = self.costs
        tokens = -(-int(work.count[chosen].sum()) // costs.top_k)
        nominal = int(costs.gpu_ns[costs.layer_class[work.layer], tokens, chosen.size])
        self._free_at[GPU] = start + nominal
        self._given[ln.GPU] += nominal
        ended = pacer.until(start + nominal)
        kind = ln.LOG_HITS if hits else ln.LOG_LANDED
        self._log(kind, start, ended, work, chosen.size)
        return ended

    def _copy(self, work: LayerWork, pacer: Pacer) -> int:
        """The link: one copy after the other, each into a slot that is free."""
        costs, ended = self.costs, work.begin_ns
        copy_ns = int(costs.copy_ns[costs.layer_class[work.layer]])
        for position in work.transfers:
            freed, slot = _get(work.vacant)
            free_at = self._free_at[LINK]
            start = max(free_at, work.begin_ns, freed)
            source, target = self.store.block[work.row[position]], self._device[slot]
            copy_poisoned(source, target)
            nominal = copy_ns + (costs.copy_wake_ns if start > free_at else 0)
            self._free_at[LINK] = start + nominal
            self._given[ln.H2D] += nominal
            work.slot[position] = slot
            ended = pacer.until(self._free_at[LINK])
            target[0] = source[0]
            work.landed.put((ended, position))
            expert = int(work.row[position] - self.store.first[work.layer])
            self._log(ln.LOG_COPY, start, ended, work, expert)
        return ended

    def _compute_on_host(self, work: LayerWork, pacer: Pacer) -> int:
        """The CPU workers: activations out, experts from the host store, outputs back."""
        costs = self.costs
        gated = np.zeros(self.store.form.width, np.float32)
        self._calculate(self.store.block, work.row, work, work.on_cpu, gated)
        counts = work.count[work.on_cpu]
        tokens = min(int(counts.sum()), work.tokens)
        called = costs.cpu_call_ns + int(costs.cpu_ns[costs.layer_class[work.layer]][counts].sum())
        begin = work.begin_ns + int(costs.act_out_ns[tokens])
        self._given[ln.D2H] += begin - work.begin_ns
        self._given[ln.CPU] += called
        self._log(ln.LOG_OUT, work.begin_ns, begin, work, tokens)
        ended = pacer.until(begin + called + int(costs.act_back_ns[tokens]))
        self._log(ln.LOG_CPU, begin, ended - int(costs.act_back_ns[tokens]), work, len(counts))
        return ended

    def _calculate(self, block: Any, row: Ints, work: LayerWork, chosen: Ints, gated: Any) -> None:
        compute(
            block,
            row,
            chosen,
            work.starts,
            work.pairs,
            work.top_k,
            work.x,
            work.weight,
            work.y,
            gated,
            self.store.form,
        )


def _get(queue: SimpleQueue[Any]) -> tuple[int, int]:
    item = queue.get()
    if item is None:
        raise _StoppedError
    stamp, value = item
    return stamp, value
