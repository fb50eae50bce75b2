"""From a composed configuration to a call of the Python interface, and its result to files."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from oled.errors import UserError

Values = Mapping[str, Any]

if TYPE_CHECKING:
    from oled.altered.reroute import Reroute
    from oled.record import Decoding, LoadedModel

log = logging.getLogger("oled")


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """Hold what a job has done: lines for people, and the figures that are its row in a sweep."""

    text: str
    figures: Values = dataclasses.field(default_factory=dict)


Job = Callable[[Values, Path], Done]


HOMES = {
    "record": "oled.cli.jobs",
    "simulate": "oled.cli.jobs",
    "run": "oled.cli.live_jobs",
    "validate": "oled.cli.live_jobs",
    "quality": "oled.cli.altered_jobs",
    "paths": "oled.cli.altered_jobs",
}
"""The module that holds the job of each verb, a function of the verb's name."""


def job_of(verb: str) -> Job:
    """Return the job of a verb; its module is imported only now."""
    job: Job = getattr(importlib.import_module(HOMES[verb]), verb)
    return job


def run(verb: str, failures: list[Exception], config: DictConfig) -> None:
    """Run a job by itself, or as one of a sweep under another launcher than ours.

    Hydra would print a line of its own if a single job raised: its error goes to `failures`.
    """
    hydra = HydraConfig.get()
    out = Path(hydra.runtime.output_dir)
    if hydra.mode is RunMode.MULTIRUN:
        from oled.cli.multirun import run_job

        run_job(verb, hydra.overrides.task, plain(config), out)
        return
    try:
        print(job_of(verb)(plain(config), out).text)
    except Exception as error:
        failures.append(error)
        _remove_unused(out, {".hydra", f"{hydra.job.name}.log"})


def _remove_unused(out: Path, notes: set[str]) -> None:
    """Remove the folder of a run that failed before it wrote anything but Hydra's notes."""
    if {entry.name for entry in out.iterdir()} <= notes and not out.samefile(Path.cwd()):
        shutil.rmtree(out)


def simulate(values: Values, out: Path) -> Done:
    """Simulate once: OUT/metrics.json, and a timeline where one is asked for."""
    from oled.sim.result import Result
    from oled.sweeps import Configuration
    from oled.sweeps.simulation import simulate_configuration, write_timeline

    _say_if_compiling()
    point = Configuration((), values)
    result = simulate_configuration(point)
    if isinstance(result, Result):
        write_timeline(result, point)
    return Done(f"{result.table()}\n{result.write(out)}", result.metrics)


def _say_if_compiling() -> None:
    from oled._jit import cache_dir

    if not any(cache_dir().iterdir()):
        log.info("compiling the simulator, which is kept for the next runs")


def record(values: Values, out: Path) -> Done:
    """Record once: a trace in OUT."""
    from oled import record

    prompts = record.load_prompts(values["prompts"], skip=values["skip"], limit=values["limit"])
    decode = decoding(values["decode"])
    report = record.record(
        checkpoint(values["model"], values["model"]["device"]),
        prompts,
        decode,
        out,
        batch_size=values["batch_size"],
        chat=values["chat"],
        horizons=values["horizons"],
        score_width=values["score_width"],
        heads=values["heads"],
        seed=values["seed"],
        reroute=values["policy"] and rule_of(values["policy"]),
    )
    names = ("requests", "tokens", "forwards", "seconds", "hook_fraction", "write_fraction")
    figures = {name: getattr(report, name) for name in names}
    return Done(str(report), {"trace": str(report.path), **figures})


def rule_of(policy: Values) -> Reroute:
    """Return the route-changing rule of a policy. Raises UserError where it has none."""
    from oled.policies.composition import load_composition

    composition = load_composition(policy)
    if composition.reroute is None:
        raise UserError(
            f"policy={composition.name} changes no routes: a model decodes the same without it"
        )
    return composition.reroute


def checkpoint(model: Values, device: str) -> LoadedModel:
    """Load the model that a `model` group describes."""
    from oled.record import load_model

    return load_model(
        model["path"],
        device,
        model["dtype"],
        trust_remote_code=model["trust_remote_code"],
        revision=model["revision"],
    )


def decoding(values: Values) -> Decoding:
    """Return the decoding settings that a `decode` group describes."""
    from oled.running import decode

    kinds = {
        "autoregressive": decode.Autoregressive,
        "block_diffusion": decode.BlockDiffusion,
        "canvas_diffusion": decode.CanvasDiffusion,
        "speculative_autoregressive": decode.SpeculativeAutoregressive,
        "speculative_blocks": decode.SpeculativeBlocks,
    }
    fields = {key: value for key, value in values.items() if key != "kind"}
    if "mode" in fields:
        fields["mode"] = decode.Mode(fields["mode"])
    if "draft" in fields:
        fields["draft"] = decode.Drafting(**fields["draft"])
    fields["eos_ids"] = fields["eos_ids"] and tuple(fields["eos_ids"])
    settings: Decoding = kinds[values["kind"]](**fields)
    return settings


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the values with interpolations resolved, `out` apart.

    Raises MissingMandatoryValue for a key that must be given and was not.
    """
    asked = OmegaConf.masked_copy(config, [str(key) for key in config if key != "out"])
    plain: Any = OmegaConf.to_container(
        asked, resolve=True, throw_on_missing=True, enum_to_str=True
    )
    return dict(plain)
