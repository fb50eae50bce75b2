"""The benches by the backend's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oled.live.backends.cpu import MEMORY
from oled.live.backends.kinds import backend_kind
from oled.models.catalogue import ModelGeometry
from oled.profiling.bench import Bench


@contextmanager
def bench_of(
    backend: str, model: ModelGeometry, link: str = MEMORY, expert_file: Path | None = None
) -> Iterator[Bench]:
    """Yield what measures a backend's machine; its memory is given back afterwards.

    `expert_file`: made for link=storage, and removed.
    """
    kind = backend_kind(backend, link, expert_file)
    with kind.failures():
        bench = _made(kind.name, model, link, expert_file)
        try:
            yield bench
        finally:
            bench.close()


def _made(backend: str, model: ModelGeometry, link: str, expert_file: Path | None) -> Bench:
    if backend == "emulated":
        from oled.profiling.bench_lanes import LanesBench

        return LanesBench(model)
    if backend == "cpu":
        from oled.profiling.bench_cpu import CpuBench

        return CpuBench(model, link, expert_file)
    from oled.live.backends.device import CudaDevice
    from oled.profiling.bench_device import DeviceBench

    return DeviceBench(model, CudaDevice())
