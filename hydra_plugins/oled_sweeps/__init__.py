"""Hydra plugins that are the default of `oled VERB -m`: a launcher on our sweep engine, a sweeper.

Hydra instantiates plugins of the namespace package `hydra_plugins` only. This module is imported by
every Hydra program of the environment, so it imports `oled` where it is used. Annotations are no
text here: Hydra executes the module before it is in `sys.modules`, where dataclasses look texts up.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclasses.dataclass
class LauncherConfig:
    """`hydra.launcher.*`; on the command line `resume=` and `sweep.*` for short."""

    _target_: str = "hydra_plugins.oled_sweeps.OledLauncher"
    resume: bool = False
    backend: str = "loky"
    workers: int | None = None
    address: str | None = None


@dataclasses.dataclass
class SweeperConfig:
    """`hydra.sweeper.*`, as of Hydra's own sweeper."""

    _target_: str = "hydra_plugins.oled_sweeps.OledSweeper"
    max_batch_size: int | None = None
    params: dict[str, Any] | None = None


_store = ConfigStore.instance().store
_store(group="hydra/launcher", name="oled", node=LauncherConfig, provider="oled")
_store(group="hydra/sweeper", name="oled", node=SweeperConfig, provider="oled")


class OledLauncher(Launcher):
    """Run the jobs of a multirun on the engine of `oled.sweeps`: journal, resume, one table."""

    def __init__(
        self, resume: bool, backend: str, workers: int | None, address: str | None
    ) -> None:
        self.resume = resume
        self.workers = (backend, workers, address)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from oled.cli.multirun import launch

        launch(self.loader, self.config, job_overrides, self.resume, self.workers)
        return [
            JobReturn(overrides=list(words), status=JobStatus.COMPLETED) for words in job_overrides
        ]


class OledSweeper(BasicSweeper):
    """Take the product of the axes as Hydra's sweeper does; end with one table of all jobs.

    The engine composes every job before it runs the first one. For other launchers the jobs are
    composed here, and their rows gathered from their folders.
    """

    def sweep(self, arguments: list[str]) -> None:
        if self.config is None or self.launcher is None or self.hydra_context is None:
            raise HydraException("the sweeper has not been set up")
        from oled.cli import multirun

        loader = self.hydra_context.config_loader
        params = [f"{key}={value}" for key, value in self.params.items()]
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(params + arguments)
        [jobs] = self.split_arguments(parsed, None)
        out = Path(str(self.config.hydra.sweep.dir))
        out.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, out / "multirun.yaml")
        if isinstance(self.launcher, OledLauncher):
            self.launcher.launch(jobs, 0)
        else:
            self.validate_batch_is_legal(jobs)
            multirun.clear(out)
            size = self.max_batch_size or len(jobs)
            try:
                for first in range(0, len(jobs), size):
                    self.launcher.launch(jobs[first : first + size], initial_job_idx=first)
            finally:
                multirun.gather(out, jobs)
        multirun.finish(out, jobs)
