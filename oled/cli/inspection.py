"""The verbs that look at something: check, stats, list, plot, bench. Plain arguments."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from oled.cli.usage import UsageError
from oled.cli.verbs import Arguments, Subparsers, add_verb
from oled.errors import UserError, nearest
from oled.paths import bundled_traces, plots_dir, trace_path
from oled.results.text import aligned

VERBS = {
    "check": "prove a trace whole, or say where it is not",
    "stats": "what a trace shows: overlap, persistence, active experts, popularity",
    "list": "what there is by name: policies, hardware, models, traces, …",
    "plot": "a figure from a results table",
    "bench": "how fast this machine simulates, decides or loads",
}


def add_verbs(verbs: Subparsers[argparse.ArgumentParser]) -> None:
    check = add_verb(verbs, "check", VERBS["check"], _check, json_too=True)
    check.add_argument("trace", metavar="TRACE", help="a folder, or the name of a bundled trace")

    stats = add_verb(verbs, "stats", VERBS["stats"], _stats, json_too=True)
    stats.add_argument("trace", metavar="TRACE", help="a folder, or the name of a bundled trace")
    stats.add_argument("--partial", action="store_true", help="read what a crash has left")
    stats.add_argument("--plot", metavar="FILE", type=Path, help="also draw it: FILE.png, FILE.pdf")

    listing = add_verb(verbs, "list", VERBS["list"], _list, json_too=True)
    listing.add_argument("kind", metavar="KIND", help=", ".join(LISTS))

    plot = add_verb(verbs, "plot", VERBS["plot"], _plot)
    plot.add_argument("name", metavar="NAME", help=", ".join(_figures()))
    plot.add_argument(
        "results", metavar="RESULTS", type=Path, help="results.parquet, its folder, or a JSON file"
    )
    plot.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="default: here")

    bench = add_verb(verbs, "bench", VERBS["bench"], _bench, json_too=True)
    bench.add_argument("what", choices=("sim", "decide", "load"))


def _show(arguments: Arguments, data: Any, lines: Iterable[str]) -> None:
    print(json.dumps(data, indent=1) if arguments.json else "\n".join(lines))


def _check(arguments: Arguments) -> int:
    from oled.trace.check import check

    report = check(trace_path(arguments.trace))
    _show(arguments, report.to_json(), report.lines())
    if not report.ok:
        raise UserError(f"{report.path} is not whole")
    return 0


def _stats(arguments: Arguments) -> int:
    from oled.trace import load
    from oled.trace.stats import locality, locality_lines

    found = locality(load(trace_path(arguments.trace), allow_partial=arguments.partial))
    _show(arguments, found.to_json(), locality_lines(found))
    if arguments.plot is not None:
        files = _draw("locality", found.to_json(), arguments.plot.parent, arguments.plot.stem)
        print(files, file=sys.stderr)
    return 0


def _policies() -> list[tuple[str, ...]]:
    from oled.parallel.system import list_systems
    from oled.policies.composition import list_compositions

    of_one_gpu = [(name, text, "; ".join(needs)) for name, text, needs in list_compositions()]
    return [*of_one_gpu, *((name, text, "topology=NAME") for name, text in list_systems())]


def _hardware() -> list[tuple[str, ...]]:
    from oled.hardware import crossovers, list_profiles, load_profile
    from oled.models.catalogue import model_geometry

    mini = model_geometry("llada2_mini")
    return [
        (name, f"{text}; {crossovers(load_profile(name), mini)}") for name, text in list_profiles()
    ]


def _runtimes() -> list[tuple[str, ...]]:
    from oled.hardware.runtime import list_runtimes

    return [*list_runtimes()]


def _topologies() -> list[tuple[str, ...]]:
    from oled.parallel.topology import list_topologies

    return [*list_topologies()]


def _models() -> list[tuple[str, ...]]:
    from oled.models.catalogue import MODELS

    return [
        (
            name,
            f"{len(m.moe_layers)} layers of {m.num_experts} experts, {m.top_k} a token, "
            f"{m.expert_bytes / 2**20:.2f} MiB each ({m.source})",
        )
        for name, m in MODELS.items()
    ]


def _traces() -> list[tuple[str, ...]]:
    return [(name, str(trace_path(name))) for name in bundled_traces()]


def _figure_list() -> list[tuple[str, ...]]:
    return [(name, str(_figure(name).__doc__).partition("\n")[0]) for name in _figures()]


def _formats() -> list[tuple[str, ...]]:
    from oled.trace.importers import IMPORTERS

    return [
        (name, f"{found.summary}; lacks {', '.join(found.lacks)}{_takes(found.options)}")
        for name, found in IMPORTERS.items()
    ]


def _exports() -> list[tuple[str, ...]]:
    from oled.trace.exporters import EXPORTERS

    return [(name, f"{found.summary}{_takes(found.options)}") for name, found in EXPORTERS.items()]


def _families() -> list[tuple[str, ...]]:
    from oled.running.survey import families, refusal

    found = ((kind, refusal(kind)) for kind in families())
    return [(kind, f"refused: {reason}" if reason else "recorded") for kind, reason in found]


def _takes(options: Iterable[str]) -> str:
    words = " ".join(f"{key}=" for key in options)
    return f"; takes {words}" if words else ""


LISTS: dict[str, Callable[[], Sequence[tuple[str, ...]]]] = {
    "policies": _policies,
    "hardware": _hardware,
    "runtimes": _runtimes,
    "topologies": _topologies,
    "models": _models,
    "traces": _traces,
    "plots": _figure_list,
    "formats": _formats,
    "exports": _exports,
    "families": _families,
}


def _list(arguments: Arguments) -> int:
    if arguments.kind not in LISTS:
        raise UsageError(f"there is no list '{arguments.kind}'; {nearest(arguments.kind, LISTS)}")
    rows = LISTS[arguments.kind]()
    fields = ("name", "description", "needs")
    data = [dict(zip(fields, row, strict=False)) for row in rows]
    lines = [aligned((name, "  · needs ".join(filter(None, rest))) for name, *rest in rows)]
    _show(arguments, data, lines)
    return 0


def _figures() -> list[str]:
    helpers = ("__init__", "style")
    return sorted(f.stem for f in plots_dir().glob("*.py") if f.stem not in helpers)


def _figure(name: str) -> Any:
    if name not in _figures():
        raise UsageError(f"there is no figure '{name}'; {nearest(name, _figures())}")
    return importlib.import_module(f"oled.bundled.plots.{name}")


def _draw(name: str, data: Any, folder: Path, stem: str) -> str:
    """Draws and saves a figure; the files' names, a line each."""
    figure = _figure(name)
    missing = [key for key in figure.NEEDS if key not in data]
    if missing:
        raise UserError(f"figure {name} needs {', '.join(missing)}: these are other results")
    try:
        drawn = figure.draw(data)
    except ValueError as error:  # the figure says what it can not draw
        raise UserError(f"figure {name}: {error}") from error
    save = importlib.import_module("oled.bundled.plots.style").save
    return "\n".join(map(str, save(drawn, folder, stem)))


def _plot(arguments: Arguments) -> int:
    from oled.results.table import read_table

    _figure(arguments.name)
    is_json = arguments.results.suffix == ".json" and arguments.results.is_file()
    data = json.loads(arguments.results.read_text()) if is_json else read_table(arguments.results)
    print(_draw(arguments.name, data, arguments.out, arguments.name))
    return 0


def _bench(arguments: Arguments) -> int:
    from oled.sim import bench

    measured: dict[str, Any] = {
        "sim": bench.sim,
        "decide": bench.decide,
        "load": bench.load,
    }[arguments.what]()
    _show(arguments, measured, (f"{name}: {value}" for name, value in measured.items()))
    return 0
