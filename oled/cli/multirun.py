"""From the jobs of a Hydra multirun to points of the sweep engine, and to a table for people."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from oled.atomic import write_text
from oled.cli import jobs
from oled.errors import UserError
from oled.results import table as results
from oled.sweeps import Configuration, Workers
from oled.sweeps.configuration import overrides_text
from oled.sweeps.engine import axes_of, row_of, run_points, table_of
from oled.sweeps.journal import Row
from oled.sweeps.run import digest_of, simulate_points
from oled.sweeps.simulation import figures_of

ROW = "row.json"
"""The file that a job of another launcher leaves in its folder."""
LOST = "the job left no record of itself: run the sweep again"

Given = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class JobPoint:
    """One job of a verb other than simulate, as a point of a sweep."""

    verb: str
    given: Given
    values: Mapping[str, Any]
    out: Path

    def columns(self) -> dict[str, Any]:
        return dict(self.given)

    def digest(self) -> str:
        text = json.dumps([self.verb, self.values], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def figures(self) -> Mapping[str, Any]:
        self.out.mkdir(parents=True, exist_ok=True)
        return results.flatten(jobs.job_of(self.verb)(self.values, self.out).figures)


def launch(
    loader: ConfigLoader,
    config: DictConfig,
    words: Sequence[Sequence[str]],
    resume: bool,
    workers: tuple[str, int | None, str | None],
) -> None:
    """Run the jobs of a multirun; their table is in the sweep's folder, whatever stops them."""
    verb, out = str(config.hydra.job.config_name), Path(str(config.hydra.sweep.dir))
    composed = list(compose_all(loader, config, words))
    if verb == "simulate":
        points = [simulation_of(given, values) for given, values in composed]
        simulate_points(points, out, resume, Workers(*workers))
        return
    by_digest: dict[str, JobPoint] = {}
    for number, (given, values) in enumerate(composed):
        point = JobPoint(verb, given, values, out / str(number))
        by_digest.setdefault(point.digest(), point)
    declaration = {"base": {"verb": verb}, "traces": {}}
    run_points(by_digest, _one_by_one, out=out, declaration=declaration, resume=resume)


def _one_by_one(points: Mapping[str, JobPoint]) -> Iterator[tuple[str, Row]]:
    for digest, point in tqdm(points.items(), unit="run", disable=None):
        yield digest, row_of(point, point.figures)


def simulation_of(given: Given, values: Mapping[str, Any]) -> Configuration:
    """Return the configuration of composed values; parts of a policy may lie beside its file."""
    policy = str(dict(given).get("policy", ""))
    is_file = policy.endswith((".yaml", ".yml"))
    beside = [str(Path(policy).parent)] if is_file else []
    return Configuration(given, values, (*beside, *values.get("searchpath", ())))


def compose_all(
    loader: ConfigLoader, config: DictConfig, words: Sequence[Sequence[str]]
) -> Iterator[tuple[Given, dict[str, Any]]]:
    """Yield what each job is given, and its values as Hydra composes them.

    Composing takes Hydra a sixth of a second. Jobs with the same options of groups are composed
    once; single values are then set in copies, by the function and in the order that Hydra uses.
    """
    parser = OverridesParser.create(config_loader=loader)
    known: dict[tuple[str, ...], DictConfig] = {}
    folders = _searched(config)
    is_group = functools.cache(lambda name: bool(loader.get_group_options(name)))
    for job in words:
        parsed = [one for one in parser.parse_overrides(list(job)) if one.key_or_group != "out"]
        first = tuple(
            str(one.input_line)
            for one in parsed
            if one.type is not OverrideType.CHANGE or is_group(one.key_or_group)
        )
        if first not in known:
            known[first] = _without_hydra(loader.load_sweep_config(config, list(first)))
        one_config = copy.deepcopy(known[first])
        rest = [one for one in parsed if one.input_line not in first]
        ConfigLoaderImpl._apply_overrides_to_config(rest, one_config)
        values = jobs.plain(one_config)
        yield given_of(parsed), {**values, "searchpath": folders} if folders else values


def _without_hydra(config: DictConfig) -> DictConfig:
    kept = OmegaConf.masked_copy(config, [str(k) for k in config if k not in ("hydra", "out")])
    OmegaConf.set_struct(kept, True)
    return kept


def _searched(config: DictConfig) -> list[str]:
    """Return the folders of policies on Hydra's search path that a user has added."""
    found = [re.sub("^file://", "", str(path)) for path in config.hydra.searchpath or ()]
    return [str(Path(path) / "policy") for path in found]


def given_of(parsed: Sequence[Override]) -> Given:
    """Return keys and values of overrides, what they override first.

    `trace=path trace.path=DIR` is `trace=DIR`.
    """
    pairs = {one.key_or_group: one.value() for one in parsed if one.key_or_group != "out"}
    for group in ("trace", "model"):
        if pairs.get(group) == "path" and f"{group}.path" in pairs:
            pairs[group] = pairs.pop(f"{group}.path")
    return tuple(sorted(pairs.items(), key=lambda pair: pair[0] != "experiment"))


def run_job(verb: str, words: Sequence[str], values: Mapping[str, Any], out: Path) -> None:
    """Run a job of another launcher and leave its row in its folder."""
    given = given_of(OverridesParser.create().parse_overrides(list(words)))
    if verb == "simulate":
        point = simulation_of(given, values).with_timeline_in(out)
        digest, row = digest_of(point), row_of(point, functools.partial(figures_of, point))
    else:
        job = JobPoint(verb, given, values, out)
        digest, row = job.digest(), row_of(job, job.figures)
    write_text(out / ROW, json.dumps({"digest": digest, **row}))


def clear(out: Path) -> None:
    """Remove the rows of an older sweep, so that two are never mixed."""
    (out / results.TABLE).unlink(missing_ok=True)
    for row in out.glob(f"*/{ROW}"):
        row.unlink()


def gather(out: Path, words: Sequence[Sequence[str]]) -> None:
    """Write the table of the jobs of another launcher; one that left nothing is a failed row."""
    rows = []
    parser = OverridesParser.create()
    given = [given_of(parser.parse_overrides(list(job))) for job in words]
    for number, pairs in enumerate(given):
        file = out / str(number) / ROW
        lost = {"overrides": overrides_text(pairs), **dict(pairs), "error": LOST}
        rows.append(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else lost)
    results.save_table(table_of(rows, axes_of(given)), out / results.TABLE)


def finish(out: Path, words: Sequence[Sequence[str]]) -> None:
    """Print the table of a sweep and where it is.

    Raises UserError where runs have failed, after naming each of them.
    """
    table = pd.read_parquet(out / results.TABLE)
    parser = OverridesParser.create()
    axes = axes_of([given_of(parser.parse_overrides(list(job))) for job in words])
    print(results.as_text(table.assign(run=only(axes, table["overrides"])), ["run"]))
    print(out / results.TABLE)
    failed = results.failures(table)
    for line in failed:
        print(f"oled: {line}", file=sys.stderr)
    if failed:
        raise UserError(f"{len(failed)} of {len(table)} runs failed")


def only(keys: Sequence[str], overrides: Iterable[str]) -> list[str]:
    """Return the overrides of each row, less those that all rows have."""
    starts = tuple(f"{key}=" for key in keys)
    return [" ".join(w for w in shlex.split(line) if w.startswith(starts)) for line in overrides]
