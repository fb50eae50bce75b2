"""A machine without a GPU played by threads that keep a profile's times.

Copies are real copies into a block of slots, experts are really computed, and each job lasts as
long as the profile says: it starts at its lane's last nominal end or when it was put, whichever is
later, does its work, sleeps until shortly before its deadline and watches the clock for the rest.
What one lane hands to another carries the *actual* time, so queueing and overlap are those of the
threads and not computed. Unpaced, jobs last as long as they last.
"""

from __future__ import annotations

import os
import threading
import time

from oled.live.backends import LayerWork, Piece
from oled.live.backends.host_experts import InMemory
from oled.live.backends.lanes import CPU, GPU, LINK
from oled.live.backends.pacing import Job, Rival, no_timer_slack
from oled.live.backends.thread_lanes import Span, ThreadLanes
from oled.live.store import HostStore
from oled.policies.interface import Costs
from oled.sim import lanes as ln
from oled.types import Ints

_NICE = {GPU: 4, CPU: 8}  # compute gives way to the lanes that keep time


class Emulated(ThreadLanes):
    """`costs` are the nominal times. The work of a lane is the nominal work that it was given."""

    def __init__(self, store: HostStore, slots: int, costs: Costs, *, paced: bool) -> None:
        super().__init__(store, InMemory(store), slots, costs, paced=paced)
        self._free_at = dict.fromkeys((GPU, LINK), 0)  # last nominal ends
        pair = Rival.pair(costs.link_contention_ppm, costs.cpu_contention_ppm)
        self._rivals = dict(zip((LINK, CPU), pair, strict=True))
        self._woken = 0  # since when there may be something to prefetch
        self._fetching: Job | None = None

    def enter_lane(self, name: str) -> None:
        if self.paced:
            no_timer_slack()
            if name in _NICE:
                this = threading.get_native_id()
                nice = os.getpriority(os.PRIO_PROCESS, this) + _NICE[name]
                os.setpriority(os.PRIO_PROCESS, this, nice)

    def wake(self) -> None:
        self._woken = self.now
        super().wake()

    def vacated(self, mark: int) -> None:
        self._woken = mark
        super().wake()

    def turn(self, cause: int) -> int:
        return max(self._free_at[GPU], cause)

    def group_span(self, work: LayerWork, chosen: Ints, turn: int, began: int) -> Span:
        costs = self.costs
        tokens = -(-int(work.count[chosen].sum()) // costs.top_k)
        nominal = int(costs.gpu_ns[costs.layer_class[work.layer], tokens, chosen.size])
        self._free_at[GPU] = turn + nominal
        self._work_ns[ln.GPU] += nominal
        return turn, self._pacers[GPU].until(turn + nominal)

    def copy_span(self, cause: int, nominal_ns: int, began: int) -> Span:
        return self._cross(self._crossing(cause, nominal_ns))

    def fetch_span(self, piece: Piece, began: int) -> Span:
        self._fetching = self._crossing(self._woken, piece.nominal_ns)
        return self._cross(self._fetching)

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

    def _cross(self, job: Job) -> Span:
        ended, self._free_at[LINK] = self._pacers[LINK].finish(job)
        self._work_ns[ln.H2D] += self._free_at[LINK] - job.start_ns
        return job.start_ns, ended

    def copy_back_span(self, cause: int, nominal_ns: int, began: int) -> Span:
        self._work_ns[ln.D2H] += nominal_ns
        return cause, self._host.until(cause + nominal_ns)

    def compute_on_host(self, work: LayerWork, cause: int) -> int:
        costs = self.costs
        counts = work.count[work.on_cpu]
        tokens = min(int(counts.sum()), work.tokens)
        called = costs.cpu_call_ns + int(costs.cpu_ns[costs.layer_class[work.layer]][counts].sum())
        begin, back_ns = cause + int(costs.act_out_ns[tokens]), int(costs.act_back_ns[tokens])
        job = self._rivals[CPU].begin(begin, called)  # before the work: the link may ask for it
        self.compute_batches(work)
        done, nominal = self._pacers[CPU].finish(job)
        self._work_ns[ln.D2H] += begin - cause
        self._work_ns[ln.CPU] += nominal - begin
        self.log(ln.LOG_OUT, cause, begin, work, tokens)
        self.log(ln.LOG_CPU, begin, done, work, len(counts))
        return self._pacers[CPU].until(nominal + back_ns)
