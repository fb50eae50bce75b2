"""Threads that work for a backend, one FIFO of jobs each, and the wait for their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from oled.errors import UserError
from oled.live.backends import LaneError, LayerWork

SILENCE_S = 60.0
"""The longest wait for an answer of any lane, in seconds."""

Mark = TypeVar("Mark")
Job = LayerWork | str


class StoppedError(Exception):
    """Another lane failed, or the run is over."""


class LaneThreads(Generic[Mark]):
    """Lanes by name. Each job that is put on a lane is answered with a mark, or with an error."""

    def __init__(self) -> None:
        self._jobs: dict[str, SimpleQueue[Job | None]] = {}
        self._answers: SimpleQueue[tuple[str, Mark | None, BaseException | None]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.running: LayerWork | None = None  # the layer-step that the lanes work on

    def start(
        self,
        name: str,
        enter: Callable[[str], None],
        run: Callable[[Job, SimpleQueue[Any]], None],
    ) -> None:
        """Start the lane `name`. Its thread calls `enter(name)` before its first job, and `run`
        with each job and the lane's queue; `run` calls `answer`.
        """
        self._jobs[name] = SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(name, enter, run), name=f"oled-{name}")
        thread.daemon = True
        self._threads.append(thread)
        thread.start()

    def put(self, name: str, job: Job) -> None:
        """Append a job to the lane's queue."""
        if isinstance(job, LayerWork):
            self.running = job
        self._jobs[name].put(job)

    def answer(self, name: str, mark: Mark | None, error: BaseException | None = None) -> None:
        """Tell the main thread that a job is done, or why it failed. Call it in the lane."""
        self._answers.put((name, mark, error))

    def wait_for(self, count: int) -> list[Mark]:
        """Wait for that many answers and return their marks.

        Raises LaneError with the first failure of any lane, or when all lanes stay silent.
        """
        failure: tuple[str, BaseException] | None = None
        marks: list[Mark] = []
        for _ in range(count):
            try:
                name, mark, error = self._answers.get(timeout=SILENCE_S)
            except Empty:
                raise LaneError(f"no lane has answered for {SILENCE_S:g} s") from None
            if mark is not None:
                marks.append(mark)
            if error is not None and (failure is None or isinstance(failure[1], StoppedError)):
                failure = (name, error)
        if failure is not None:
            name, error = failure
            if isinstance(error, UserError):
                raise LaneError(f"the {name} lane failed: {error}") from error
            raise LaneError(f"the {name} lane failed: {error!r}") from error
        self.running = None
        return marks

    def stop(self) -> None:
        """End all lanes, in whatever state they are, and join their threads."""
        self._interrupt()
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._jobs.clear()
        self._threads.clear()

    def _serve(
        self,
        name: str,
        enter: Callable[[str], None],
        run: Callable[[Job, SimpleQueue[Any]], None],
    ) -> None:
        entered, jobs = False, self._jobs[name]
        while (job := jobs.get()) is not None:
            try:
                if not entered:
                    enter(name)
                    entered = True
                run(job, jobs)
            except BaseException as error:  # the main thread must learn of every error
                self._interrupt()
                self.answer(name, None, error)

    def _interrupt(self) -> None:
        """Wake the lanes that wait for one another."""
        if self.running is not None:
            for _ in range(2):
                self.running.landed.put(None)
                self.running.vacant.put(None)


def get_or_stop(queue: SimpleQueue[Any]) -> tuple[Any, int]:
    """Wait for the next (mark, number) of a queue. Raises StoppedError when the run is over."""
    item = queue.get()
    if item is None:
        raise StoppedError
    mark, value = item
    return mark, value
