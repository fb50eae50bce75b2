"""The lanes of `backend=cpu`, one call at a time, alone and beside each other.

Each compute lane's job runs on the CPU that the lane has; the link is that of the run: memory, or a
file that is read past the page cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from oled.errors import UserError
from oled.live.backends.cpu import MEMORY, STORAGE, lane_cpus
from oled.live.backends.lanes import CPU, GPU
from oled.live.direct_io import DirectReader, measured_depth, rounded_up
from oled.live.expert_file import HEADER_BYTES, ExpertFile
from oled.live.store import page_aligned
from oled.models.catalogue import ModelGeometry
from oled.profiling.bench import Spread, Together, timed
from oled.profiling.bench_lanes import LanesBench

_FILE_BYTES = 128 * 2**20
"""Of the file that is read: more than the largest copy."""


class CpuBench(LanesBench):
    """See `oled.profiling.bench.Bench`. `file`: of link=storage; it is made and removed here."""

    def __init__(self, model: ModelGeometry, link: str = MEMORY, file: Path | None = None) -> None:
        super().__init__(model)
        self.backend = "cpu"
        self.gpu = f"none: a budget of memory, link={link}"
        self.facts |= {"link": link, "lane_cpus": {k: sorted(v) for k, v in lane_cpus().items()}}
        self._undo = ExitStack()
        self._reader: DirectReader | None = None
        if link == STORAGE:
            if file is None:
                raise UserError("link=storage needs a place for a file: expert_file=FILE")
            if file.exists():
                raise UserError(f"{file} is there already: name one that can be made and removed")
            self._open(file)

    def _open(self, file: Path) -> None:
        rows = max(8, _FILE_BYTES // rounded_up(4 * self.form.size))
        counts = self._store.num_experts * 0 + rows
        experts = ExpertFile.random(file, self.form, counts, 0)
        self._undo.callback(file.unlink, missing_ok=True)
        depth = measured_depth(file, experts.row_bytes, rows, HEADER_BYTES)
        self._reader = self._undo.enter_context(DirectReader(file, depth))
        self._file, self._rows_on_disk = experts, rows
        self._target = page_aligned(experts.row_bytes)  # the CPU lane's
        self.facts["queue_depth"] = depth

    def close(self) -> None:
        super().close()
        self._undo.close()

    def _copying(self, numbers: int, inward: bool) -> Callable[[int], Any]:
        """Copies of the link; to the host always in memory."""
        reader = self._reader
        if reader is None or not inward:
            return super()._copying(numbers, inward)
        size = rounded_up(4 * numbers)
        target = page_aligned(size)
        target[:] = 0
        places = max(1, (self._file.file_bytes - HEADER_BYTES) // size)
        return lambda turn: reader.read(HEADER_BYTES + turn % places * size, [target])

    def group(self, active: int, tokens: int, top_k: int) -> Spread:
        with _on(GPU):
            return super().group(active, tokens, top_k)

    def cpu_expert(self, tokens: int, threads: int) -> Spread:
        """One expert of the CPU lane; from storage it is read first."""
        with _on(CPU):
            return timed(self._on_cpu(tokens), 200)

    def _on_cpu(self, tokens: int) -> Callable[[int], Any]:
        computing, reader = self._computing(1, tokens, 1), self._reader
        if reader is None:
            return computing

        def read_and_compute(turn: int) -> None:
            reader.read(self._file.offset(turn % self._rows_on_disk), [self._target])
            computing(turn)

        return read_and_compute

    def together(self) -> Together:
        """One expert of 4 tokens on the CPU lane, and one on the link."""
        computing, copying = self._on_cpu(4), self._copying(self.form.size, True)
        with _on(CPU):
            cpu_alone, cpu_beside = timed(computing), _beside(None, copying, computing)
        return Together(
            cpu_alone=cpu_alone,
            cpu_beside=cpu_beside,
            copy_alone=timed(copying),
            copy_beside=_beside(CPU, computing, copying),
        )

    def lanes_beside(self) -> dict[str, float]:
        jobs: dict[str, tuple[str | None, Callable[[int], Any]]] = {
            "gpu": (GPU, self._computing(1, 4, 1)),
            "link": (None, self._copying(self.form.size, True)),
            "cpu": (CPU, self._on_cpu(4)),
        }
        found: dict[str, float] = {}
        for name, (lane, job) in jobs.items():
            for other, (its_lane, its_job) in jobs.items():
                if other != name:
                    with _on(lane):
                        times = _beside(its_lane, its_job, job).value / timed(job).value
                    found[f"{name} beside {other}"] = round(times, 3)
        return found


@contextmanager
def _on(lane: str | None) -> Iterator[None]:
    """The calling thread runs on the lane's CPU; without a lane on any."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, lane_cpus().get(lane or "", os.sched_getaffinity(os.getpid())))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def _beside(lane: str | None, other: Callable[[int], Any], job: Callable[[int], Any]) -> Spread:
    """Measure `job` while `lane` runs `other` again and again."""
    stop = threading.Event()

    def run() -> None:
        turn = 0
        with _on(lane):
            while not stop.is_set():
                other(turn)
                turn += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return timed(job)
    finally:
        stop.set()
        thread.join()
