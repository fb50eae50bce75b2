"""The benches by the backend's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from oled.live.backends.kinds import backend_kind
from oled.models.catalogue import ModelGeometry
from oled.profiling.bench import Bench


@contextmanager
def bench_of(backend: str, model: ModelGeometry) -> Iterator[Bench]:
    """What measures a backend's machine; its memory is given back afterwards."""
    kind = backend_kind(backend)
    with kind.failures():
        bench = _made(kind.name, model)
        try:
            yield bench
        finally:
            bench.close()


def _made(backend: str, model: ModelGeometry) -> Bench:
    if backend == "emulated":
        from oled.profiling.bench_lanes import LanesBench

        return LanesBench(model)
    from oled.live.backends.device import CudaDevice
    from oled.profiling.bench_device import DeviceBench

    return DeviceBench(model, CudaDevice())
