"""From a composed configuration to a call of the Python interface, and its result to files."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from oled.errors import UserError
from oled.results import table as results

Values = Mapping[str, Any]
Job = Callable[[Values, Path, bool], str]

if TYPE_CHECKING:
    from oled.altered.reroute import Reroute
    from oled.record import Decoding, LoadedModel
    from oled.sim.prepared import PreparedTrace
    from oled.trace import Trace
    from oled.trace.stages import Cues
    from oled.trace.synthetic import Synthetic

LEARNED = "learned"
"""`workload.stages` where cues are to be learned."""

log = logging.getLogger("oled")

failure: list[Exception] = []
"""Why the single run failed. Hydra would print a line of its own if the job raised it."""


def run(job: Job, config: DictConfig) -> None:
    """Runs a job by itself or as one of a sweep."""
    hydra = HydraConfig.get()
    out = Path(hydra.runtime.output_dir)
    if hydra.mode is RunMode.MULTIRUN:
        results.write_json(out / results.JOB, {"error": _error_of(job, config, out)})
        return
    try:
        print(job(_plain(config), out, False))
    except Exception as error:
        failure.append(error)
        _remove_unused(out, {".hydra", f"{hydra.job.name}.log"})


def _remove_unused(out: Path, notes: set[str]) -> None:
    """The folder of a run that failed before it wrote anything but Hydra's notes."""
    if {entry.name for entry in out.iterdir()} <= notes and not out.samefile(Path.cwd()):
        shutil.rmtree(out)


def _error_of(job: Job, config: DictConfig, out: Path) -> str | None:
    """Runs a job of a sweep; what went wrong is returned, so that the other jobs go on."""
    try:
        job(_plain(config), out, True)
    except UserError as error:
        return str(error)
    except Exception as error:
        log.exception("the job failed")
        return f"{type(error).__name__}: {error}"
    return None


def simulate(values: Values, out: Path, in_sweep: bool) -> str:
    """One simulation: OUT/metrics.json, and a timeline where one is asked for."""
    source = source_of(values["trace"])
    if values["topology"] is not None:
        from oled.cli import parallel_jobs

        trace = _trace(source, values["trace"]["allow_partial"])
        return parallel_jobs.simulate(trace, values, out)
    from oled.sim.api import simulate

    _say_if_compiling()
    subject = _subject(source, values["trace"]["allow_partial"], _cues(values, source))
    timeline = values["timeline"]
    result = simulate(
        subject,
        values["policy"],
        hardware=values["hardware"],
        runtime=values["runtime"],
        calibration=_calibration(values, source),
        **values["cache"],
        batch_size=values["workload"]["batch_size"],
        **values["cost"],
        timeline=_window(subject, values["window"]) if timeline else None,
        seed=values["seed"],
    )
    if result.timeline:  # each job of a sweep has one of its own
        result.timeline.write(out / Path(timeline).name if in_sweep else Path(timeline))
    return f"{result.table()}\n{result.write(out)}"


def _say_if_compiling() -> None:
    from oled._jit import cache_dir

    if not any(cache_dir().iterdir()):
        log.info("compiling the simulator, which is kept for the next runs")


@functools.lru_cache(maxsize=1)
def _subject(source: str | Synthetic, allow_partial: bool, cues: Cues | None) -> PreparedTrace:
    """The trace made ready; the jobs of a sweep that run one after the other share it."""
    from oled.sim.prepared import PreparedTrace
    from oled.trace.stages import mark_stages

    if cues is not None:
        return PreparedTrace.of(mark_stages(_trace(source, allow_partial), cues))
    return PreparedTrace.of(folder_of(source), allow_partial=allow_partial)


@functools.lru_cache(maxsize=2)
def _trace(source: str | Synthetic, allow_partial: bool) -> Trace:
    from oled.trace import load

    return load(folder_of(source), allow_partial=allow_partial)


def folder_of(source: str | Synthetic) -> Path:
    """Where the trace is; a made-up one is made if it is not there yet."""
    from oled.paths import trace_path

    if isinstance(source, str):
        return trace_path(source)
    log.info("trace %s", source.name)
    return source.folder()


def _cues(values: Values, source: str | Synthetic) -> Cues | None:
    """What marks the stages of the text: a file, or learned from the calibration trace."""
    from oled.trace.stages import learn_cues, read_cues

    stages = values["workload"]["stages"]
    if stages is None:
        return None
    if stages != LEARNED:
        return read_cues(stages)
    other = values["calibration"]
    if other is None and not isinstance(source, str):
        other = source.calibration()
    if other is None:
        raise UserError(
            f"workload.stages={LEARNED}: give the trace to learn from with calibration=NAME|DIR"
        )
    return learn_cues(_trace(other, False))


def source_of(trace: Values) -> str | Synthetic:
    """A bundled name, a folder, or the description of a synthetic trace."""
    from oled.trace.synthetic import Synthetic

    if "geometry" not in trace:
        return str(trace["path"])
    ours = ("path", "allow_partial")
    return Synthetic(**{key: value for key, value in trace.items() if key not in ours})


def _calibration(values: Values, source: str | Synthetic) -> str | Path | None:
    """The one given; for a synthetic trace other requests of its model, where they are needed."""
    from oled.policies.composition import load_composition

    given: str | None = values["calibration"]
    if isinstance(source, str) or given is not None:
        return given
    needs = load_composition(values["policy"]).needs
    return source.calibration().folder() if "calibration" in needs else None


def _window(subject: PreparedTrace, window: list[int] | None) -> tuple[int, int]:
    from oled.sim.window import first_block

    if window is None:
        return first_block(subject.steps)
    if len(window) != 2:
        raise UserError(f"window={window}: write [first forward, number of forwards]")
    return window[0], window[1]


def record(values: Values, out: Path, in_sweep: bool) -> str:
    """One recording: a trace in OUT."""
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
    return str(report)


def rule_of(policy: Values) -> Reroute:
    """The route-changing rule of a policy that has one."""
    from oled.policies.composition import load_composition

    composition = load_composition(policy)
    if composition.reroute is None:
        raise UserError(
            f"policy={composition.name} changes no routes: a model decodes the same without it"
        )
    return composition.reroute


def checkpoint(model: Values, device: str) -> LoadedModel:
    """The model that a `model` group describes."""
    from oled.record import load_model

    return load_model(
        model["path"],
        device,
        model["dtype"],
        trust_remote_code=model["trust_remote_code"],
        revision=model["revision"],
    )


def decoding(values: Values) -> Decoding:
    """The decoding settings that a `decode` group describes."""
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


def _plain(config: DictConfig) -> dict[str, Any]:
    """Interpolations resolved; a key that must be given and was not is an error."""
    asked = OmegaConf.masked_copy(config, [str(key) for key in config if key != "out"])
    plain: Any = OmegaConf.to_container(
        asked, resolve=True, throw_on_missing=True, enum_to_str=True
    )
    return dict(plain)
