"""From a composed configuration to a call of the Python interface, and its result to files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from oled import results
from oled.errors import UserError

if TYPE_CHECKING:
    from oled.sim.api import Result

log = logging.getLogger("oled")


def simulate(config: DictConfig) -> None:
    """One simulation. In a sweep an error is written down and the other jobs go on."""
    run = HydraConfig.get()
    out = Path(run.runtime.output_dir)
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True, enum_to_str=True)
    if run.mode is RunMode.RUN:
        print(_simulate(plain, out).table())
        print(out / results.METRICS)
        return
    try:
        _simulate(plain, out)
    except Exception as error:
        if not isinstance(error, UserError):
            log.exception("job %s", run.job.num)
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        results.write_json(out / results.ERROR, {"error": message})
