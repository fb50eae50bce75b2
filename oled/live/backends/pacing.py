"""Waiting for a moment, to a few microseconds."""

from __future__ import annotations

import ctypes
import sys
import time

import numpy as np

from oled.live.kernels import spin_until

SPIN_NS = 120_000  # of a wait are watched, not slept
_PR_SET_TIMERSLACK = 29


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
        left = deadline_ns - now - SPIN_NS
        if left > 0:
            time.sleep(left / 1e9)
        now = int(spin_until(deadline_ns, self._clock))
        self.late_ns = max(self.late_ns, now - deadline_ns)
        return now


def no_timer_slack() -> None:
    """Linux wakes sleepers up to 50 us late to save power; ask for 1 ns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
