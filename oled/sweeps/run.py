"""`sweep`: workers return rows, the parent writes them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
from joblib import Parallel, delayed
from tqdm import tqdm

from oled.errors import UserError
from oled.paths import trace_path
from oled.results import table as results
from oled.sweeps.configuration import DEFAULTS, Configuration, product
from oled.sweeps.journal import Journal, Row
from oled.sweeps.workers import Workers
from oled.trace.reader import open_manifest, trace_hash
from oled.trace.synthetic import Synthetic

log = logging.getLogger("oled")

Axes = Mapping[str, Any] | Iterable[Mapping[str, Any]]


def sweep(
    axes: Axes,
    *,
    base: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: Workers = Workers(),  # noqa: B008 (frozen)
) -> pd.DataFrame:
    """Simulate every point of `axes` (see `product`); one row a configuration, failed ones too.

    The keys are those of the command line: {"policy": ["lru", "oled"], "cache.slots": [40, 100]}.
    With `out` the rows are kept in OUT/results.parquet; `resume` computes only what is missing.
    """
    asked = product(axes, base)
    hashes = _trace_hashes(asked)
    by_digest: dict[str, Configuration] = {}  # a default that is spelt out makes no new point
    for point in asked:
        by_digest.setdefault(point.digest(hashes[point.trace_name]), point)
    digests = {point: digest for digest, point in by_digest.items()}
    points = list(digests)
    with ExitStack() as claims:
        journal, rows = None, {}
        if out is not None:
            claims.enter_context(results.claimed(Path(out)))
            declaration = {"base": _common(points), "traces": hashes}
            journal = Journal(Path(out), declaration, resume=resume)
            rows = dict(journal.done)
        missing = [point for point in points if digests[point] not in rows]
        try:
            for point, row in _computed(missing, workers, done=len(points) - len(missing)):
                rows[digests[point]] = {"digest": digests[point], **row}
                if journal:
                    journal.append(rows[digests[point]])
        finally:  # whatever stops the sweep, what is done is kept
            done = [rows[digests[point]] for point in points if digests[point] in rows]
            table = None if out is None else results.write_table(done, Path(out) / results.TABLE)
    return pd.DataFrame(done) if table is None else table


def _trace_hashes(points: Iterable[Configuration]) -> dict[str, str]:
    """By name of the trace; synthetic ones are generated here, before anybody needs them."""
    hashes: dict[str, str] = {}
    for point in points:
        if point.trace_name not in hashes:
            hashes[point.trace_name] = trace_hash(
                open_manifest(_folder(point.trace), allow_partial=False)
            )
    return hashes


def _folder(trace: str | Synthetic) -> Path:
    if not isinstance(trace, Synthetic):
        return trace_path(trace)
    log.info("trace %s", trace.name)
    return trace.folder()


def _common(points: list[Configuration]) -> dict[str, Any]:
    """The values that all configurations have: the base configuration."""
    first = points[0]
    keys = [*DEFAULTS, *dict(first.given)]
    rest = [dict(point.given) for point in points]
    return {
        key: dict(first.given).get(key, DEFAULTS.get(key))
        for key in keys
        if len({str(given.get(key, DEFAULTS.get(key))) for given in rest}) == 1
    }


def _computed(
    points: list[Configuration], workers: Workers, *, done: int
) -> Iterator[tuple[Configuration, Row]]:
    """Rows as they come."""
    groups = _groups(points)
    with (
        tqdm(total=done + len(points), initial=done, unit="run", disable=None) as bar,
        workers.ready(),
    ):
        how = "generator_unordered" if workers.streams else "list"
        for group in Parallel(return_as=how)(delayed(simulate_all)(g) for g in groups):
            bar.update(len(group))
            yield from group


def _groups(points: list[Configuration]) -> list[list[Configuration]]:
    """Configurations that share their references, to be computed together; groups that differ in
    their machine only stand side by side, since a worker knows the decisions that it made last."""
    groups: dict[Any, list[Configuration]] = {}
    for point in points:
        groups.setdefault(point.without_policy(), []).append(point)
    near: dict[Any, list[list[Configuration]]] = {}
    for group in groups.values():
        near.setdefault(group[0].without_machine(), []).append(group)
    return [group for side_by_side in near.values() for group in side_by_side]


def simulate_all(points: list[Configuration]) -> list[tuple[Configuration, Row]]:
    """Runs in a worker: the rows of configurations that differ in their policies only."""
    return [(point, _row(point)) for point in points]


def _row(point: Configuration) -> Row:
    row = {"overrides": point.overrides, **point.columns()}
    try:
        return row | {"error": None} | _metrics(point)
    except UserError as error:
        return row | {"error": str(error)}
    except Exception as error:
        log.exception("%s failed", point.overrides)
        return row | {"error": f"{type(error).__name__}: {error}"}


def _metrics(point: Configuration) -> Row:
    from oled.sim.api import simulate

    if point.value("topology") is not None:
        return _on_several_gpus(point)
    composition, calibration = point.composition(), point.value("calibration")
    trace = point.trace
    if calibration is None and isinstance(trace, Synthetic) and "calibration" in composition.needs:
        calibration = _subject(trace.calibration())
    result = simulate(
        _subject(trace),
        composition,
        hardware=point.hardware(),
        runtime=point.runtime(),
        calibration=calibration,
        **point.settings(),
    )
    per_request = {f"requests.{k}": values.tolist() for k, values in result.per_request.items()}
    return results.flatten(result.metrics | per_request)


def _on_several_gpus(point: Configuration) -> Row:
    from oled.parallel.api import simulate

    if point.value("calibration") is not None:
        raise UserError("calibration is for policies of one GPU: leave it out with topology=")
    links = point.topology()
    if links is None:
        raise ValueError("the point has no topology")
    result = simulate(
        _loaded(point.trace),
        point.system(),
        links,
        hardware=point.hardware(),
        runtime=point.runtime(),
        batch_size=point.value("workload.batch_size"),
        geometry=point.value("cost.geometry"),
    )
    return results.flatten(result.metrics)


@functools.lru_cache(maxsize=1)
def _loaded(trace: str | Synthetic) -> Any:
    from oled.trace import load

    return load(_folder(trace))


@functools.lru_cache(maxsize=2)
def _subject(trace: str | Synthetic) -> Any:
    """The trace made ready, once a worker, and the one to learn from.

    No more are kept: a worker of loky that grows by 300 MB is taken to leak and begun anew.
    """
    from oled.sim.prepared import PreparedTrace

    subject = PreparedTrace.of(trace.folder() if isinstance(trace, Synthetic) else trace)
    return subject.remembering()
