"""Waiting for a moment, to a few microseconds."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from oled.live.kernels import spin_until

_SWITCH_S = 5e-5  # longest time that a thread keeps the interpreter
SPIN_NS = 120_000  # of a wait are watched, not slept
PPM = 1_000_000
_PR_SET_TIMERSLACK = 29
_REMEMBERED = 512  # jobs of a lane; none spans as many of the other's


class Pacer:
    """Waits for deadlines and remembers the worst lateness."""

    def __init__(self, paced: bool) -> None:
        self.late_ns = 0
        self._paced = paced
        self._clock = np.zeros(2, np.int64)

    def until(self, deadline_ns: int) -> int:
        """The time after waiting; at once where time is not kept."""
        now = time.perf_counter_ns()
        if not self._paced:
            return now
        now = self._wait(deadline_ns, now)
        self.late_ns = max(self.late_ns, now - deadline_ns)
        return now

    def finish(self, job: Job) -> tuple[int, int]:
        """Wait for the end of a job that another lane may slow down: (actual, nominal) end."""
        now = time.perf_counter_ns()
        if not self._paced:
            return now, job.close(now)
        while (end := job.earliest_end(now)) > now:  # sooner it can not be; later it may
            now = self._wait(end, now)
        self.late_ns = max(self.late_ns, now - end)
        return now, job.close(end)

    def _wait(self, deadline_ns: int, now: int) -> int:
        left = deadline_ns - now - SPIN_NS
        if left > 0:
            time.sleep(left / 1e9)
        return int(spin_until(deadline_ns, self._clock))


class Rival:
    """One of two lanes that slow each other down while both work."""

    def __init__(self, rate_ppm: int) -> None:
        self.rate_ppm = rate_ppm
        self.other = self
        self.jobs: deque[Job] = deque(maxlen=_REMEMBERED)

    @classmethod
    def pair(cls, rate_ppm: int, other_ppm: int) -> tuple[Rival, Rival]:
        """Each goes at so many millionths of its speed while the other works, too."""
        one, other = cls(rate_ppm), cls(other_ppm)
        one.other, other.other = other, one
        return one, other

    def begin(self, start_ns: int, work_ns: int) -> Job:
        job = Job(self, start_ns, work_ns)
        self.jobs.append(job)
        return job


class Job:
    """`work_ns` at full speed, from `start_ns` on."""

    def __init__(self, lane: Rival, start_ns: int, work_ns: int) -> None:
        self.start_ns = start_ns
        self.end_ns: int | None = None  # not yet
        self._work_ns = work_ns
        self._lane = lane

    def earliest_end(self, now: int) -> int:
        """When it ends if the other lane's job, should one run, ended `now`."""
        rate = self._lane.rate_ppm
        at, left = self.start_ns, self._work_ns * PPM
        if rate < PPM:
            for other in tuple(self._lane.other.jobs):
                begin = max(at, other.start_ns)
                end = now if other.end_ns is None else other.end_ns
                if end <= begin:
                    continue
                alone = (begin - at) * PPM
                if left <= alone:
                    break
                left -= alone
                if left <= (end - begin) * rate:
                    return begin + -(-left // rate)
                left -= (end - begin) * rate
                at = end
        return at + -(-left // PPM)

    def close(self, end_ns: int) -> int:
        self.end_ns = end_ns
        return end_ns


@contextmanager
def on_time() -> Iterator[None]:
    """Threads take turns often, the collector rests, sleepers wake up when they said."""
    switch, collecting = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(_SWITCH_S)
    gc.disable()
    no_timer_slack()
    try:
        yield
    finally:
        sys.setswitchinterval(switch)
        if collecting:
            gc.enable()


def no_timer_slack() -> None:
    """Linux wakes sleepers up to 50 us late to save power; ask for 1 ns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
