"""The real clock on any machine: real copies, real arithmetic, and no lane waits for a time.

The device is a budget of memory, the slots. The link copies experts from the host's memory or reads
them from a file; each compute lane works on CPUs of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from oled.errors import UserError, nearest
from oled.hardware.this_machine import processor
from oled.live.backends import Backend, LayerWork, Piece
from oled.live.backends.host_experts import HostExperts, InMemory, OnDisk
from oled.live.backends.kind import Kind, Progress
from oled.live.backends.lanes import CPU, GPU
from oled.live.backends.thread_lanes import Span, ThreadLanes
from oled.live.direct_io import measured_depth
from oled.live.expert_file import HEADER_BYTES, ExpertFile
from oled.live.kernels import ExpertForm
from oled.live.store import HostStore, Numbers, Store
from oled.policies.interface import Costs
from oled.sim import lanes as ln
from oled.types import Ints

log = logging.getLogger("oled")

MEMORY, STORAGE = "memory", "storage"
LINKS = (MEMORY, STORAGE)


class Cpu(ThreadLanes):
    """The work of a lane is the time that its jobs took."""

    def enter_lane(self, name: str) -> None:
        cpus = lane_cpus().get(name)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)  # of the calling thread

    def turn(self, cause: int) -> int:
        return time.perf_counter_ns()

    def group_span(self, work: LayerWork, chosen: Ints, turn: int, began: int) -> Span:
        return self._span(ln.GPU, began)

    def copy_span(self, cause: int, nominal_ns: int, began: int) -> Span:
        return self._span(ln.H2D, began)

    def fetch_span(self, piece: Piece, began: int) -> Span:
        return self._span(ln.H2D, began)

    def copy_back_span(self, cause: int, nominal_ns: int, began: int) -> Span:
        return self._span(ln.D2H, began)

    def compute_on_host(self, work: LayerWork, cause: int) -> int:
        began = time.perf_counter_ns()
        self.compute_batches(work)
        began, ended = self._span(ln.CPU, began)
        self.log(ln.LOG_CPU, began, ended, work, len(work.on_cpu))
        return ended

    def _span(self, lane: int, began: int) -> Span:
        ended = time.perf_counter_ns()
        self._work_ns[lane] += ended - began
        return began, ended


def lane_cpus() -> dict[str, set[int]]:
    """Return the CPU that each compute lane has for itself; none where there is only one.

    The kernel of an expert is one thread: its sums do not depend on how many lanes there are.
    """
    mine = sorted(os.sched_getaffinity(os.getpid()))
    return {} if len(mine) < 2 else {GPU: {mine[-1]}, CPU: {mine[0]}}


def cpu_kind(link: str, file: Path | None) -> Kind[Any]:
    """Return the backend. `file`: of the experts that link=storage reads, made where it is missing.

    Raises UserError for an unknown link, or where link and file do not go together.
    """
    if link not in LINKS:
        raise UserError(f"link={link} is not known; {nearest(link, LINKS)}")
    if link == MEMORY:
        if file is not None:
            raise UserError(f"expert_file={file} is read with link=storage only")
        return _kind(HostStore.random, InMemory)
    if file is None:
        raise UserError("link=storage reads the experts from a file: give expert_file=FILE")

    def random(
        form: ExpertForm, num_experts: Ints, seed: int, _: Numbers, progress: Progress
    ) -> ExpertFile:
        return ExpertFile.random(file, form, num_experts, seed, progress)

    depths: dict[Path, int] = {}

    def on_disk(experts: ExpertFile) -> OnDisk:
        if experts.path not in depths:
            rows = int(experts.num_experts.sum())
            depth = measured_depth(experts.path, experts.row_bytes, rows, HEADER_BYTES)
            log.info("%s: %d reads at a time are the fastest", experts.path, depth)
            depths[experts.path] = depth
        return OnDisk(experts, depths[experts.path])

    return _kind(random, on_disk, file)


S = TypeVar("S", bound=Store)


def _kind(
    random: Callable[[ExpertForm, Ints, int, Numbers, Progress], S],
    experts: Callable[[S], HostExperts],
    expert_file: Path | None = None,
) -> Kind[S]:
    def make(store: S, slots: int, costs: Costs, paced: bool) -> Backend:
        return Cpu(store, experts(store), slots, costs, paced=paced)

    return Kind(
        name="cpu",
        machine=processor(),
        device="cpu",
        numbers=("float32",),
        tolerance=0.0,
        keeps_time=False,
        pins=False,
        device_free=lambda: None,
        random=random,
        make=make,
        held=lambda _: nullcontext(),
        failures=nullcontext,
        expert_file=expert_file,
    )
