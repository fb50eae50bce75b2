"""Simulate one configuration: the single place between values of keys and `oled.sim`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oled.errors import UserError
from oled.parallel import api as parallel
from oled.paths import trace_path
from oled.results import table as results
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
from oled.sim.result import Result
from oled.sim.window import first_block
from oled.sweeps.configuration import Configuration
from oled.trace import Trace, load
from oled.trace.reader import open_manifest, trace_hash
from oled.trace.stages import Cues, learn_cues, mark_stages, read_cues
from oled.trace.synthetic import Synthetic

log = logging.getLogger("oled")

LEARNED = "learned"
"""`workload.stages` where cues are to be learned."""


def simulate_configuration(point: Configuration) -> Result | parallel.Result:
    """Simulate a configuration on one GPU, or on several where it has a topology.

    Raises UserError for whatever a user can mend.
    """
    if point.values["topology"] is not None:
        return _on_several_gpus(point)
    composition = point.composition()
    calibration = point.values["calibration"]
    source = point.trace
    if calibration is None and isinstance(source, Synthetic) and "calibration" in composition.needs:
        calibration = _prepared(source.calibration(), False, None)
    subject = _prepared(source, point.value("trace.allow_partial"), _cues(point))
    return simulate(
        subject,
        composition,
        hardware=point.hardware(),
        runtime=point.runtime(),
        calibration=calibration,
        timeline=_window(point, subject) if point.values["timeline"] else None,
        **point.settings(),
    )


def figures_of(point: Configuration) -> Mapping[str, Any]:
    """Return a configuration's columns of figures; write its timeline, where one is asked for."""
    result = simulate_configuration(point)
    if not isinstance(result, Result):
        return results.flatten(result.metrics)
    write_timeline(result, point)
    per_request = {f"requests.{k}": values.tolist() for k, values in result.per_request.items()}
    return results.flatten(result.metrics | per_request)


def write_timeline(result: Result, point: Configuration) -> None:
    """Write the timeline of a result, if the configuration asks for one."""
    if result.timeline is not None:
        file = Path(point.values["timeline"])
        file.parent.mkdir(parents=True, exist_ok=True)
        result.timeline.write(file)


def _on_several_gpus(point: Configuration) -> parallel.Result:
    """Simulate on the GPUs of a topology. Caches and the CPU have no part in it."""
    for key in ("timeline", "calibration"):
        if point.values[key] is not None:
            raise UserError(f"{key} is for policies of one GPU: leave it out with topology=")
    links = point.topology()
    if links is None:
        raise ValueError("the point has no topology")
    return parallel.simulate(
        _loaded(point.trace, point.value("trace.allow_partial")),
        point.system(),
        links,
        hardware=point.hardware(),
        runtime=point.runtime(),
        batch_size=point.value("workload.batch_size"),
        geometry=point.value("cost.geometry"),
    )


def folder_of(source: str | Synthetic) -> Path:
    """Return the folder of a trace; make a made-up one that is not there yet."""
    if isinstance(source, str):
        return trace_path(source)
    log.info("trace %s", source.name)
    return source.folder()


def _loaded(source: str | Synthetic, allow_partial: bool) -> Trace:
    return _load_once(*_identity(source, allow_partial), allow_partial)


def _prepared(source: str | Synthetic, allow_partial: bool, cues: Cues | None) -> PreparedTrace:
    return _prepare_once(*_identity(source, allow_partial), allow_partial, cues)


def _identity(source: str | Synthetic, allow_partial: bool) -> tuple[Path, str]:
    """Return folder and hash: a folder whose trace has been replaced is another trace."""
    folder = folder_of(source).resolve()
    return folder, trace_hash(open_manifest(folder, allow_partial=allow_partial))


@functools.lru_cache(maxsize=1)
def _load_once(folder: Path, _hash: str, allow_partial: bool) -> Trace:
    return load(folder, allow_partial=allow_partial)


@functools.lru_cache(maxsize=2)
def _prepare_once(
    folder: Path, _hash: str, allow_partial: bool, cues: Cues | None
) -> PreparedTrace:
    """Return the trace made ready, once a worker: the subject, and the one to learn from.

    No more are kept: a worker of loky that grows by 300 MB is taken to leak and begun anew.
    """
    if cues is None:
        return PreparedTrace.of(folder, allow_partial=allow_partial).remembering()
    trace = _load_once(folder, _hash, allow_partial)
    return PreparedTrace.of(mark_stages(trace, cues)).remembering()


def _cues(point: Configuration) -> Cues | None:
    """Return what marks the stages of the text: a file, or learned from the calibration trace."""
    stages = point.value("workload.stages")
    if stages is None:
        return None
    if stages != LEARNED:
        return read_cues(stages)
    other, source = point.values["calibration"], point.trace
    if other is None and isinstance(source, Synthetic):
        other = source.calibration()
    if other is None:
        raise UserError(
            f"workload.stages={LEARNED}: give the trace to learn from with calibration=NAME|DIR"
        )
    return learn_cues(_loaded(other, False))


def _window(point: Configuration, subject: PreparedTrace) -> tuple[int, int]:
    window = point.values["window"]
    if window is None:
        return first_block(subject.steps)
    if len(window) != 2:
        raise UserError(f"window={window}: write [first forward, number of forwards]")
    return window[0], window[1]
