"""GPU, link and CPU workers as threads, one FIFO each: the order of a layer-step's work.

A backend adds the few calls of its device. A *mark* tells when something is done, in the backend's
own terms: the actual nanosecond where threads play the device, an event of a stream on a real one.
A lane that depends on another's work gets its mark and waits for it, or has the device wait.

While no layer-step needs the link, it copies the pieces that the `PrefetchFeed` gives it. Copies on
demand overtake waiting prefetches, and never a piece that is being copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import Any, Generic

import numpy as np

from oled.live.backends import LayerWork, Piece, PrefetchFeed
from oled.live.backends.lane_threads import Job, LaneThreads, Mark, StoppedError, get_or_stop
from oled.live.backends.pacing import Pacer, on_time
from oled.live.backends.serial import run_serially
from oled.types import Ints

GPU, LINK, CPU = "gpu", "link", "cpu"

WAKE, FLUSH = "wake", "flush"
"""Jobs of the link beside layer-steps: look for something to prefetch; answer when idle."""


class Lanes(ABC, Generic[Mark]):
    """Runs layer-steps; the abstract methods are the device's.

    `paced`: what the host does between two steps lasts as long as it says.
    """

    def __init__(self, paced: bool) -> None:
        self.paced = paced
        self.now = 0  # the actual end of the last section or step
        self.entries: list[tuple[int, ...]] = []  # as in `oled.sim.timeline.Timeline`
        self._host = Pacer(paced)
        self._section = 0, 0  # actual and nominal end of the host's last section
        self._threads: LaneThreads[Mark] = LaneThreads()
        self._prefetches: PrefetchFeed | None = None
        self._undo = ExitStack()

    @abstractmethod
    def begin(self, work: LayerWork) -> Mark:
        """The step begins: from this mark on, slots that are free may be written."""

    @abstractmethod
    def copy(self, work: LayerWork, position: int, slot: int, vacant: Mark) -> Mark:
        """Copy the expert at `position` into `slot`, free from `vacant` on; when it lands."""

    @abstractmethod
    def fetch(self, piece: Piece) -> Mark:
        """Copy a piece and return when it has crossed."""

    @abstractmethod
    def copy_back(self, work: LayerWork, slot: int, row: int, cause: Mark) -> Mark:
        """Copy an evicted expert back to its host row, from `cause` on; when it is there."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """The calling thread waits for `mark`."""

    @abstractmethod
    def turn(self, cause: Mark) -> Mark:
        """When the GPU can begin a launch group whose last missing part is there at `cause`."""

    @abstractmethod
    def landed_by(self, landed: Mark, turn: Mark) -> bool:
        """Whether an expert that lands at `landed` belongs to the group that begins at `turn`."""

    @abstractmethod
    def group(self, work: LayerWork, chosen: Ints, turn: Mark, *, hits: bool) -> Mark:
        """One launch group of the experts at positions `chosen`, all landed by `turn`; its end."""

    @abstractmethod
    def compute_on_host(self, work: LayerWork, cause: Mark) -> Mark:
        """From `cause` on: activations out, the experts at `work.on_cpu` from the host store,
        outputs back.
        """

    @abstractmethod
    def end(self, work: LayerWork, marks: list[Mark]) -> Any:
        """The step ends with these marks of its lanes; its outputs [T, H]."""

    @abstractmethod
    def start(self) -> None:
        """See `Backend.start`."""

    def host(self, kind: int, nominal_ns: int, forward: int, layer: int) -> None:
        ended, due = self._section
        due = (due if ended == self.now else self.now) + nominal_ns  # sections in a row are chained
        begin, self.now = self.now, self._host.until(due)
        self._section = self.now, due
        if self.now > begin:
            self.entries.append((kind, begin, self.now, forward, layer, 0))

    def note(self, kind: int, forward: int, layer: int, item: int) -> None:
        self.entries.append((kind, self.now, self.now, forward, layer, item))

    def enter_lane(self, name: str) -> None:
        """Called in a lane's thread before its first job."""

    def fetched(self) -> None:
        """Called when it is known that the piece has crossed."""

    def settle(self) -> None:
        """See `Backend.settle`; what a device can not tell at once it may learn later."""

    def vacated(self, mark: Mark) -> None:
        """A slot falls free at `mark` while a step runs: the link may prefetch into it."""
        self.wake()

    def open(self, prefetches: PrefetchFeed | None) -> None:
        self._prefetches = prefetches
        if self.paced:
            self._undo.enter_context(on_time())
        self._threads.start(GPU, self.enter_lane, self._serve(GPU, self._compute))
        self._threads.start(LINK, self.enter_lane, self._serve_link)
        self._threads.start(CPU, self.enter_lane, self._serve(CPU, self._compute_on_host))

    def close(self) -> None:
        self._threads.stop()
        self._undo.close()

    def wake(self) -> None:
        if self._prefetches is not None:
            self._threads.put(LINK, WAKE)

    def drain(self) -> None:
        if self._prefetches is not None:
            self._threads.put(LINK, FLUSH)
            self._threads.wait_for(1)

    def run(self, work: LayerWork) -> Any:
        begin = self.begin(work)
        work.begin = begin
        if work.blocking:
            return self.end(work, [run_serially(self, work)])
        for slot in work.free:
            work.vacant.put((begin, slot))
        lanes = []
        if work.hits.size or work.transfers.size or work.late.size:
            lanes.append(GPU)
        if work.transfers.size:
            lanes.append(LINK)
        if work.on_cpu.size:
            lanes.append(CPU)
        for name in lanes:
            self._threads.put(name, work)
        return self.end(work, self._threads.wait_for(len(lanes)))

    def _serve(
        self, name: str, lane: Callable[[LayerWork], Mark]
    ) -> Callable[[Job, SimpleQueue[Any]], None]:
        """The jobs of a lane that has nothing but layer-steps."""

        def serve(job: Job, _: SimpleQueue[Any]) -> None:
            if isinstance(job, LayerWork):
                self._threads.answer(name, lane(job))

        return serve

    def _serve_link(self, job: Job, jobs: SimpleQueue[Any]) -> None:
        if job == FLUSH:
            self._threads.answer(LINK, None)
            return
        if isinstance(job, LayerWork):
            self._threads.answer(LINK, self._copy_all(job))
        if self._prefetches is not None:
            self._prefetch(self._prefetches, jobs)

    def _prefetch(self, prefetches: PrefetchFeed, jobs: SimpleQueue[Any]) -> None:
        """Copy pieces while no layer-step needs the link."""
        while jobs.empty() and (piece := prefetches.next()) is not None:
            prefetches.crossed(self.fetch(piece))
            self.fetched()

    def _compute(self, work: LayerWork) -> Mark:
        """The GPU: hits as one group, then whenever it is free all that have landed."""
        ended: Mark = work.begin
        if work.hits.size:
            ended = self.group(work, work.hits, self.turn(ended), hits=True)
        late = set(work.late.tolist())  # they keep staging slots until the step ends
        self._vacate(work, work.released, ended)
        left, held = work.transfers.size + len(late), None
        while left:
            mark, first = held or get_or_stop(work.landed)
            held, chosen = None, [first]
            turn = self.turn(mark)
            while len(chosen) < left and held is None:
                try:
                    item = work.landed.get_nowait()
                except Empty:
                    break
                if item is None:
                    raise StoppedError
                if self.landed_by(item[0], turn):
                    chosen.append(item[1])
                else:
                    held = item
            ended = self.group(work, np.array(chosen), turn, hits=False)
            leaving = [i for i in chosen if not work.stays[i] and i not in late]
            self._vacate(work, [int(work.slot[i]) for i in leaving], ended)
            left -= len(chosen)
        return ended

    def _vacate(self, work: LayerWork, slots: Sequence[int], mark: Mark) -> None:
        """Slots whose experts have computed."""
        for slot in slots:
            work.vacant.put((mark, slot))
        if slots:
            self.vacated(mark)

    def _copy_all(self, work: LayerWork) -> Mark:
        """The link: one copy after the other, each into a slot that is free."""
        ended: Mark = work.begin
        for position in work.transfers:
            vacant, slot = get_or_stop(work.vacant)
            ended = self.copy(work, int(position), slot, vacant)
            work.slot[position] = slot
            work.landed.put((ended, int(position)))
        work.copied = True
        return ended

    def _compute_on_host(self, work: LayerWork) -> Mark:
        return self.compute_on_host(work, work.begin)
