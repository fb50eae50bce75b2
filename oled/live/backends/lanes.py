"""GPU, link and CPU workers as threads, one FIFO each: the order of a layer-step's work.

What a backend adds are the few calls of its device. A *mark* is when something is done, in the
backend's own terms: the actual nanosecond where threads play the device, an event of a stream on a
real one. Whoever needs a thing gets its mark and waits for it, or has the device wait.

While no layer-step wants the link, it copies ahead what `Ahead` gives it, piece by piece: copies on
demand overtake what waits and never a piece on its way.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from oled.live.backends import Ahead, LaneError, LayerWork, Piece
from oled.live.backends.pacing import Pacer, on_time
from oled.types import Ints

SILENCE_S = 60.0  # without an answer of any lane

GPU, LINK, CPU = "gpu", "link", "cpu"

WAKE, FLUSH = "wake", "flush"
"""Jobs of the link beside layer-steps: look for something to copy ahead; say that it is idle."""

Mark = TypeVar("Mark")


class StoppedError(Exception):
    """Another lane failed, or the run is over."""


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
        self._jobs: dict[str, SimpleQueue[LayerWork | str | None]] = {}
        self._done: SimpleQueue[tuple[str, Mark | None, BaseException | None]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: LayerWork | None = None
        self._ahead: Ahead | None = None
        self._undo = ExitStack()

    @abstractmethod
    def begin(self, work: LayerWork) -> Mark:
        """The step begins: from this mark on, slots that are free may be written."""

    @abstractmethod
    def copy(self, work: LayerWork, position: int, slot: int, vacant: Mark) -> Mark:
        """Copy the expert at `position` into `slot`, free from `vacant` on; when it lands."""

    @abstractmethod
    def fetch(self, piece: Piece) -> Mark:
        """Copy a piece ahead; returns when it has crossed."""

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
        """It is known that the piece has crossed."""

    def settle(self) -> None:
        """See `Backend.settle`; what a device can not tell at once it may learn later."""

    def vacated(self, mark: Mark) -> None:
        """A slot falls free at `mark` while a step runs: the link may copy ahead into it."""
        self.wake()

    def open(self, ahead: Ahead | None) -> None:
        self._ahead = ahead
        if self.paced:
            self._undo.enter_context(on_time())
        lanes = ((GPU, self._compute), (LINK, self._copy_all), (CPU, self._compute_on_host))
        for name, job in lanes:
            self._jobs[name] = SimpleQueue()
            thread = threading.Thread(target=self._lane, args=(name, job), name=f"oled-{name}")
            thread.daemon = True
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        if self._running is not None:
            _stop(self._running)
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._jobs.clear()
        self._threads.clear()
        self._undo.close()

    def wake(self) -> None:
        if self._ahead is not None:
            self._jobs[LINK].put(WAKE)

    def drain(self) -> None:
        if self._ahead is not None:
            self._jobs[LINK].put(FLUSH)
            self._wait_for(1)

    def run(self, work: LayerWork) -> Any:
        begin = self.begin(work)
        work.begin = begin
        if work.blocking:
            return self.end(work, [self._run_serially(work)])
        for slot in work.free:
            work.vacant.put((begin, slot))
        lanes = []
        if work.hits.size or work.transfers.size or work.late.size:
            lanes.append(GPU)
        if work.transfers.size:
            lanes.append(LINK)
        if work.on_cpu.size:
            lanes.append(CPU)
        self._running = work
        for name in lanes:
            self._jobs[name].put(work)
        marks = self._wait_for(len(lanes))
        self._running = None
        return self.end(work, marks)

    def _wait_for(self, lanes: int) -> list[Mark]:
        """The last marks of that many lanes; raises what went wrong first in any of them."""
        failure: tuple[str, BaseException] | None = None
        marks: list[Mark] = []
        for _ in range(lanes):
            try:
                name, mark, error = self._done.get(timeout=SILENCE_S)
            except Empty:
                raise LaneError(f"no lane has answered for {SILENCE_S:g} s") from None
            if mark is not None:
                marks.append(mark)
            if error is not None and (failure is None or isinstance(failure[1], StoppedError)):
                failure = (name, error)
        if failure is not None:
            raise LaneError(f"the {failure[0]} lane failed: {failure[1]!r}") from failure[1]
        return marks

    def _lane(self, name: str, job: Callable[[LayerWork], Mark]) -> None:
        entered, jobs = False, self._jobs[name]
        while (work := jobs.get()) is not None:
            try:
                if not entered:
                    self.enter_lane(name)
                    entered = True
                if work == FLUSH:
                    self._done.put((name, None, None))
                    continue
                if isinstance(work, LayerWork):
                    self._done.put((name, job(work), None))
                if name == LINK and self._ahead is not None:
                    self._copy_ahead(self._ahead, jobs)
            except BaseException as error:  # whatever it is, the main thread must hear of it
                if self._running is not None:
                    _stop(self._running)
                self._done.put((name, None, error))

    def _copy_ahead(self, ahead: Ahead, jobs: SimpleQueue[Any]) -> None:
        """The link, while nobody wants it."""
        while jobs.empty() and (piece := ahead.next()) is not None:
            ahead.crossed(self.fetch(piece))
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
            mark, first = held or _get(work.landed)
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
            vacant, slot = _get(work.vacant)
            ended = self.copy(work, int(position), slot, vacant)
            work.slot[position] = slot
            work.landed.put((ended, int(position)))
        return ended

    def _compute_on_host(self, work: LayerWork) -> Mark:
        return self.compute_on_host(work, work.begin)

    def _run_serially(self, work: LayerWork) -> Mark:
        """A blocking runtime: each thing is waited for before the next one begins."""
        mark: Mark = work.begin
        for slot, row in work.out:
            mark = self._waited(self.copy_back(work, slot, row, mark))
        chosen, free, released = work.hits.tolist(), list(work.free), list(work.released)
        coming, first = work.transfers.tolist(), True
        while True:
            while coming and free:
                position, slot = coming.pop(0), free.pop(0)
                mark = self._waited(self.copy(work, position, slot, mark))
                work.slot[position] = slot
                chosen.append(position)
                if not work.stays[position]:
                    released.append(slot)
            if chosen:
                turn = self.turn(mark)
                mark = self._waited(self.group(work, np.array(chosen), turn, hits=first))
            if not coming:
                break
            if not released:
                raise RuntimeError("a transfer waits for a slot that never becomes free")
            chosen, free, released, first = [], released, [], False
        if work.on_cpu.size:
            mark = self._waited(self.compute_on_host(work, mark))
        return mark

    def _waited(self, mark: Mark) -> Mark:
        self.wait(mark)
        return mark


def _stop(work: LayerWork) -> None:
    """Wake the lanes that wait for one another."""
    for _ in range(2):
        work.landed.put(None)
        work.vacant.put(None)


def _get(queue: SimpleQueue[Any]) -> tuple[Any, int]:
    item = queue.get()
    if item is None:
        raise StoppedError
    mark, value = item
    return mark, value
