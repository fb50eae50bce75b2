"""Who computes: processes of this machine, a Dask cluster or a Ray cluster, all through joblib."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from joblib import cpu_count, parallel_config

from oled.errors import UserError, nearest

BACKENDS = ("loky", "dask", "ray")


@dataclasses.dataclass(frozen=True, slots=True)
class Workers:
    """The keys of `sweep.*`. Without an address a cluster is started on this machine."""

    backend: str = "loky"
    count: int | None = None  # of worker processes; None: one a core
    address: str | None = None  # of a running Dask scheduler or Ray head

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UserError(f"sweep.backend={self.backend}: {nearest(self.backend, BACKENDS)}")
        if self.count is not None and self.count < 1:
            raise UserError(f"sweep.workers={self.count}: it must be at least 1")

    @property
    def processes(self) -> int:
        return cpu_count() if self.count is None else self.count

    @property
    def streams(self) -> bool:
        """Whether results come while others are still computed; joblib's Ray backend waits."""
        return self.backend != "ray"

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, joblib's `Parallel` computes on these workers."""
        if self.backend == "loky":
            with parallel_config("loky", n_jobs=self.processes), warnings.catch_warnings():
                # a worker that has grown by 300 MB is begun anew, as large traces make it; no loss
                warnings.filterwarnings("ignore", message="A worker stopped while some jobs")
                yield
        elif self.backend == "dask":
            with self._dask():
                yield
        else:
            with self._ray():
                yield

    @contextmanager
    def _dask(self) -> Iterator[None]:
        try:
            from dask.distributed import Client
        except ImportError as error:
            raise UserError("sweep.backend=dask needs the extra: pip install oled[dask]") from error
        local = {"n_workers": self.processes, "threads_per_worker": 1, "dashboard_address": None}
        client = Client(self.address) if self.address else Client(silence_logs="ERROR", **local)
        with client, parallel_config("dask"):
            yield

    @contextmanager
    def _ray(self) -> Iterator[None]:
        try:
            import ray
            from ray.util.joblib import register_ray
        except ImportError as error:
            raise UserError("sweep.backend=ray needs the extra: pip install oled[ray]") from error
        local = {"num_cpus": self.processes, "include_dashboard": False}
        ray.init(self.address, log_to_driver=False, **({} if self.address else local))
        try:
            register_ray()
            with parallel_config("ray"):
                yield
        finally:
            ray.shutdown()
