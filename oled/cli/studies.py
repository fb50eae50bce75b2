"""The verbs that run many simulations: sweep, reproduce, report. Their arguments are key=value."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from oled.cli.usage import UsageError
from oled.errors import nearest
from oled.paths import conf_dir, studies

VERBS = {
    "sweep": "simulate the product of axes on all cores or a cluster, one row a configuration",
    "reproduce": "a study of the paper's figures: its sweep, its plot, ours beside the paper's",
    "report": "gather tables and figures of a folder into one HTML page",
}

USAGE = {
    "sweep": "oled sweep experiment=NAME|FILE.yaml [key=value[,value...] ...]",
    "reproduce": "oled reproduce NAME|all [--small] [--redraw] [out=DIR] [resume=true]",
    "report": "oled report DIR",
}

SWEEP_KEYS = """\
keys:
  experiment=NAME|FILE.yaml    what is swept (`hydra.sweeper.params`), as of simulate -m
  key=value[,value...]         any key of `oled simulate`; several values are an axis
  hardware=NAME@slow           the profile with all numbers at their slow (fast, low, high) end
  out=DIR                      DIR/results.parquet (default: outputs/sweep/NAME)
  resume=true                  compute only what is missing in DIR
  sweep.backend=loky|dask|ray  processes of this machine, or a cluster
  sweep.workers=N              how many (default: one a core)
  sweep.address=HOST:PORT      of a running Dask scheduler or Ray head
"""

REPRODUCE_KEYS = """\
  --small        a small preset, for a look and for tests
  --redraw       figure and table anew from the rows that are there; nothing is simulated
  out=DIR        where studies go (default: experiments/results)
  resume=true    compute only what is missing
  sweep.*        as of oled sweep
"""

FLAGS = ("--small", "--redraw")
OPTIONS = ("out", "resume", "sweep.backend", "sweep.workers", "sweep.address")


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    epilogs = {
        "sweep": SWEEP_KEYS,
        "reproduce": f"{REPRODUCE_KEYS}\nstudies: {', '.join(studies())}\n",
        "report": "DIR holds results of studies or sweeps; writes DIR/report.html\n",
    }
    for verb, summary in VERBS.items():
        verbs.add_parser(
            verb,
            help=summary,
            usage=USAGE[verb],
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=epilogs[verb],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )


def run(verb: str, arguments: list[str]) -> int:
    logger = logging.getLogger("oled")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    return {"sweep": _sweep, "reproduce": _reproduce, "report": _report}[verb](arguments)


def _sweep(arguments: list[str]) -> int:
    from oled.results import table as results
    from oled.sweeps import sweep

    given = _pairs(arguments)
    if "experiment" not in given:
        raise UsageError("experiment=NAME must be given; 'oled sweep --help' says more")
    name = given.pop("experiment")
    options = {key: given.pop(key) for key in OPTIONS if key in given}
    axes = experiment(name) | {key: _values(text) for key, text in given.items()}
    out = Path(options.get("out", f"outputs/sweep/{Path(name).stem}"))
    table = sweep(axes, out=out, resume=_flag(options), workers=_workers(options))
    varying = [key for key, values in axes.items() if len(values) > 1]
    print(results.as_text(table.assign(run=_only(varying, table["overrides"])), ["run"]))
    print(out / results.TABLE)
    return _failures(table)


def _reproduce(arguments: list[str]) -> int:
    from oled.studies.reproduce import reproduce

    words = [word for word in arguments if "=" not in word and word not in FLAGS]
    given = _pairs(word for word in arguments if "=" in word)
    for key in given:
        if key not in OPTIONS:
            raise UsageError(f"there is no key '{key}'; {nearest(key, OPTIONS)}")
    if len(words) != 1:
        raise UsageError(f"name one study, or all; known: {', '.join(studies())}")
    if words[0] not in (*studies(), "all"):
        raise UsageError(f"there is no study '{words[0]}'; {nearest(words[0], studies())}")
    failed = 0
    for name in studies() if words[0] == "all" else words:
        folder, table = reproduce(
            name,
            Path(given.get("out", "experiments/results")),
            small="--small" in arguments,
            redraw="--redraw" in arguments,
            resume=_flag(given),
            workers=_workers(given),
        )
        print(folder / "table.md")
        failed |= _failures(table)
    return failed


def _report(arguments: list[str]) -> int:
    from oled.results.report import report

    if len(arguments) != 1:
        raise UsageError("oled report DIR: name one folder")
    print(report(Path(arguments[0])))
    return 0


def experiment(name: str) -> dict[str, list[Any]]:
    """The axes of an experiment's YAML: its `hydra.sweeper.params`, and its values outside."""
    is_file = name.endswith((".yaml", ".yml"))
    file = Path(name) if is_file else conf_dir() / "experiment" / f"{name}.yaml"
    if not file.is_file():
        known = [path.stem for path in (conf_dir() / "experiment").glob("*.yaml")]
        raise UsageError(f"there is no experiment '{name}'; {nearest(name, known)}")
    data = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    params = data.pop("hydra", {}).get("sweeper", {}).get("params", {})
    if not params:
        raise UsageError(f"{file}: has no hydra.sweeper.params: nothing is swept")
    fixed = {key: [value] for key, value in _flat(data, "")}
    return fixed | {key: _values(str(text)) for key, text in params.items()}


def _flat(node: dict[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _values(text: str) -> list[Any]:
    """`20,50` as a list of YAML values."""
    try:
        values = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError as error:
        raise UsageError(f"'{text}' is no list of values: write them with commas") from error
    return list(values)


def _pairs(words: Iterable[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f"'{word}' is not key=value")
        pairs[key] = value
    return pairs


def _flag(options: dict[str, str]) -> bool:
    text = options.get("resume", "false")
    if text not in ("true", "false"):
        raise UsageError(f"resume={text}: it is true or false")
    return text == "true"


def _workers(options: dict[str, str]) -> Any:
    from oled.sweeps import Workers

    count = options.get("sweep.workers")
    if count is not None and not count.isdecimal():
        raise UsageError(f"sweep.workers={count}: it is a number")
    return Workers(
        options.get("sweep.backend", "loky"),
        None if count is None else int(count),
        options.get("sweep.address"),
    )


def _only(keys: list[str], overrides: Iterable[str]) -> list[str]:
    """The overrides of each row, less those that all rows have."""
    starts = tuple(f"{key}=" for key in keys)
    words = [shlex.split(line) for line in overrides]
    return [" ".join(word for word in line if word.startswith(starts)) for line in words]


def _failures(table: Any) -> int:
    """Names what failed; the exit code."""
    if "error" not in table:
        return 0
    failed = table[table["error"].notna()]
    for row in failed.itertuples():
        print(f"oled: {row.overrides} failed: {row.error}", file=sys.stderr)
    return 1 if len(failed) else 0
