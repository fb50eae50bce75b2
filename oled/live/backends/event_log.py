"""Timeline entries between events of a device, told in times of the host's clock."""

from __future__ import annotations

import time
from queue import SimpleQueue

import numpy as np

from oled.live.backends.device import Event, Stream
from oled.sim import lanes as ln
from oled.types import Ints

_REBASE_NS = 1_000_000_000  # CUDA tells times between events in 32-bit floats
_LANE_OF = {
    ln.LOG_HITS: ln.GPU,
    ln.LOG_LANDED: ln.GPU,
    ln.LOG_COPY: ln.H2D,
    ln.LOG_PREFETCH: ln.H2D,
    ln.LOG_OUT: ln.D2H,
    ln.LOG_BACK: ln.D2H,
    ln.LOG_CPU: ln.CPU,
}


class EventLog:
    """Adds to `entries`: kind, begin, end, forward, layer, item."""

    def __init__(self, stream: Stream, entries: list[tuple[int, ...]]) -> None:
        self.entries = entries
        self._coming: SimpleQueue[tuple[int, Event, Event, int, int, int]] = SimpleQueue()
        self._base = stream.mark()
        self._base.wait()
        self._base_ns = time.perf_counter_ns()
        self._told = 0

    def add(self, kind: int, begin: Event, end: Event, where: tuple[int, int], item: int) -> None:
        """An entry between two events; `where` is forward and layer. From any thread."""
        self._coming.put((kind, begin, end, *where, item))

    def settle(self, recent: Event) -> None:
        """Turn into entries what is over; `recent` is done."""
        if recent.ns_since(self._base) > _REBASE_NS:
            self._base_ns += recent.ns_since(self._base)
            self._base = recent
        for _ in range(self._coming.qsize()):
            entry = self._coming.get()
            kind, begin, end, *rest = entry
            if end.done():
                times = (self._base_ns + event.ns_since(self._base) for event in (begin, end))
                self.entries.append((kind, *times, *rest))
            else:
                self._coming.put(entry)

    def take(self) -> Ints:
        """Time that each lane worked in entries since the last call, i64[4]."""
        worked = np.zeros(4, np.int64)
        for kind, begin, end, *_ in self.entries[self._told :]:
            if kind in _LANE_OF:
                worked[_LANE_OF[kind]] += end - begin
        self._told = len(self.entries)
        return worked
