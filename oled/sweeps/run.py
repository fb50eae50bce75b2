"""`sweep`: simulations of every point of some axes, on all cores or on a cluster."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
from joblib import Parallel, delayed
from tqdm import tqdm

from oled.results.claims import claimed
from oled.sweeps.configuration import DEFAULTS, Configuration, product
from oled.sweeps.engine import row_of, run_points
from oled.sweeps.journal import Row
from oled.sweeps.simulation import figures_of, folder_of
from oled.sweeps.workers import Workers
from oled.trace.reader import open_manifest, trace_hash

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
    points = product(axes, base)
    with ExitStack() as claims:
        if out is not None:
            claims.enter_context(claimed(Path(out)))
        return simulate_points(points, None if out is None else Path(out), resume, workers)


def simulate_points(
    asked: list[Configuration], out: Path | None, resume: bool, workers: Workers
) -> pd.DataFrame:
    """Simulate configurations, each once, and return their table; OUT is claimed by the caller."""
    hashes = _trace_hashes(asked)
    points: dict[str, Configuration] = {}  # a default that is spelt out makes no new point
    for point in asked:
        points.setdefault(point.digest(hashes[point.trace_name]), point)
    placed = {
        digest: point.with_timeline_in(None if out is None else out / str(number))
        for number, (digest, point) in enumerate(points.items())
    }
    declaration = {"base": _common(list(points.values())), "traces": hashes}

    def compute(missing: Mapping[str, Configuration]) -> Iterator[tuple[str, Row]]:
        return _computed(missing, workers, done=len(points) - len(missing))

    return run_points(placed, compute, out=out, declaration=declaration, resume=resume)


def digest_of(point: Configuration) -> str:
    """Return the digest of one configuration, as the sweeps have it."""
    return point.digest(_trace_hashes([point])[point.trace_name])


def _trace_hashes(points: Iterable[Configuration]) -> dict[str, str]:
    """Return hashes by name of the trace; make synthetic ones before anybody needs them."""
    hashes: dict[str, str] = {}
    for point in points:
        if point.trace_name not in hashes:
            partial = point.value("trace.allow_partial")
            manifest = open_manifest(folder_of(point.trace), allow_partial=partial)
            hashes[point.trace_name] = trace_hash(manifest)
    return hashes


def _common(points: list[Configuration]) -> dict[str, Any]:
    """Return the values that all configurations have: the base configuration."""
    given = [dict(point.given) for point in points]
    keys = dict.fromkeys([*DEFAULTS, *(key for one in given for key in one)])
    found = {key: [one.get(key, DEFAULTS.get(key)) for one in given] for key in keys}
    return {key: values[0] for key, values in found.items() if len({*map(str, values)}) == 1}


def _computed(
    points: Mapping[str, Configuration], workers: Workers, *, done: int
) -> Iterator[tuple[str, Row]]:
    """Yield rows as they come, with their digests."""
    with (
        tqdm(total=done + len(points), initial=done, unit="run", disable=None) as bar,
        workers.ready(),
    ):
        how = "generator_unordered" if workers.streams else "list"
        groups = Parallel(return_as=how)(delayed(simulate_all)(g) for g in _groups(points))
        for group in groups:
            bar.update(len(group))
            yield from group


Group = list[tuple[str, Configuration]]


def _groups(points: Mapping[str, Configuration]) -> list[Group]:
    """Return configurations that share their references, to be computed together.

    Groups that differ in their machine only stand side by side, since a worker knows the decisions
    that it made last.
    """
    groups: dict[str, Group] = {}
    for digest, point in points.items():
        groups.setdefault(point.without_policy(), []).append((digest, point))
    near: dict[str, list[Group]] = {}
    for group in groups.values():
        near.setdefault(group[0][1].without_machine(), []).append(group)
    return [group for side_by_side in near.values() for group in side_by_side]


def simulate_all(group: Group) -> list[tuple[str, Row]]:
    """Return the rows of configurations that differ in their policies only; runs in a worker."""
    return [
        (digest, row_of(point, functools.partial(figures_of, point))) for digest, point in group
    ]
