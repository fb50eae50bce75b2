"""The verbs that run live or size a machine: run, validate, profile, fit. Arguments: key=value."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path

from oled.cli import runs
from oled.cli.usage import UsageError
from oled.errors import nearest

VERBS = {
    "run": "a model decodes with offloaded experts, or a trace's routing is run live",
    "validate": "live runs beside simulations of the same routing: decisions, outputs, times",
    "profile": "measure this machine into a hardware profile",
    "fit": "what of a model fits a GPU and its host, and how many experts stay",
}

KEYS = {
    "run": """\
  model=tiny|NAME|PATH         a model that transformers stores with fused experts
  prompts=FILE skip=N limit=N  JSONL; default: two of the bundled prompts
  decode=block_diffusion|autoregressive  and its keys, as in oled record
  trace=NAME|DIR forwards=N    instead of a model: its routing with random weights;
                               workload.batch_size=N requests in lockstep
  policy=NAME|FILE.yaml  cache.slots=10|0.25|8GiB  cache.scope=  cache.staging=8  cache.lifecycle=
  backend=emulated|cpu|cuda    threads that keep a profile's times, threads that keep none, a GPU
  link=memory|storage          of backend=cpu; storage reads a file past the page cache
  expert_file=FILE             of link=storage: made where it is missing, and kept
  paced=true                   jobs last as long as on hardware=NAME (cost.geometry=NAME)
  calibration=NAME|DIR         another trace, for policies that learn beforehand
  heads=bundled|FILE           trained predictors and surrogates, for policies that use them
  quality=false                of a policy that gives misses up: without what becomes of the text
  timeline=FILE.json.gz        live and simulated side by side; opens in Perfetto
  out=OUT                      writes OUT/run.json""",
    "validate": """\
  preset=short|full            45 seconds, or minutes
  policies=[lru,oled]  cache.slots=[20,50]  trace=NAME|DIR  forwards=N  repeats=3
  workload.batch_size=1
  hardware=NAME|FILE.yaml  runtime=NAME  cost.geometry=NAME   whose times the lanes keep
  pace.dilation=3              in slow motion; pace.kept=false: no times are kept, no gate
  gated=false                  the clock's error is told, decisions and outputs alone decide
  backend=emulated|cpu|cuda    cpu, cuda: experts of cost.geometry's size; hardware=FILE of oled
                               profile
  link=memory|storage          of backend=cpu, as in oled run; expert_file=FILE
  out=DIR                      writes DIR/report.json, DIR/validate.png""",
    "profile": """\
  model=NAME                   whose experts are measured (oled list models); no weights needed
  top_k=N                      of the routing that is to be replayed; default: the model's
  backend=emulated|cpu|cuda  link=memory|storage (of backend=cpu; storage reads a file beside out)
  out=FILE.yaml                for hardware=FILE.yaml""",
    "fit": """\
  model=NAME                   see oled list models
  gpu_memory=24GiB  host_memory=64GiB  context=4096
  batch_size=1  staging=8
  trace=NAME|DIR               also which experts it uses most, and how much of its routing
  out=FILE.json                all of it, with every expert that stays""",
}

DEFAULTS = {
    "profile": {"model": "tiny", "top_k": "", "backend": "emulated", "link": "memory", "out": ""},
    "fit": {
        "model": "",
        "gpu_memory": "",
        "host_memory": "",
        "context": "",
        "batch_size": "1",
        "staging": "8",
        "trace": "",
        "out": "",
    },
}
OPTIONAL = {"profile": ("top_k",), "fit": ("trace", "out")}


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for verb, summary in VERBS.items():
        verbs.add_parser(
            verb,
            help=summary,
            usage=f"oled {verb} [key=value ...]",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"keys:\n{KEYS[verb]}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )


def run(verb: str, arguments: list[str]) -> int:
    """Runs a verb whose arguments are key=value."""
    if verb == "profile":
        return _profile(_values(verb, arguments))
    if verb == "fit":
        return _fit(_values(verb, arguments))
    from oled.cli import live_jobs

    runs.quiet_bars()
    job = {"run": live_jobs.run, "validate": live_jobs.validate}[verb]
    return runs.run_hydra(verb, arguments, job)


def _values(verb: str, arguments: list[str]) -> Mapping[str, str]:
    values = dict(DEFAULTS[verb])
    for argument in arguments:
        key, given, value = argument.partition("=")
        if key not in values:
            raise UsageError(f"there is no key '{key}'; {nearest(key, values)}")
        if not given or not value:
            raise UsageError(f"'{argument}' is not key=value")
        values[key] = value
    for key, value in values.items():
        if not value and key not in OPTIONAL[verb]:
            raise UsageError(f"{key} must be given")
    return values


def _profile(values: Mapping[str, str]) -> int:
    from oled.hardware import describe, load_profile
    from oled.models.catalogue import model_geometry
    from oled.profiling.bench_kinds import bench_of
    from oled.profiling.file import write_profile
    from oled.profiling.measure import measure

    out = Path(values["out"])
    if out.is_dir():
        raise UsageError(f"out={out} is a folder: name the file to write, such as mine.yaml")
    runs.log_to_stderr()
    model = model_geometry(values["model"])
    if values["top_k"]:
        model = dataclasses.replace(model, top_k=_top_k(values, model.num_experts))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    on_disk = values["link"] == "storage"
    beside = out.with_suffix(".experts") if on_disk else None
    with bench_of(values["backend"], model, values["link"], beside) as bench:
        profile = measure(bench, model, today)
    file = write_profile(profile, out)
    absent = [f"  absent: {what}: {why}" for what, why in profile["absent"].items()]
    print("\n".join([describe(load_profile(profile), model), *absent, str(file)]))
    return 0


def _fit(values: Mapping[str, str]) -> int:
    from oled.advise.fit import fit
    from oled.errors import UserError
    from oled.models.catalogue import model_geometry
    from oled.results.table import write_json
    from oled.sim.prepared import PreparedTrace

    found = fit(
        model_geometry(values["model"]),
        _bytes(values, "gpu_memory"),
        _bytes(values, "host_memory"),
        _whole(values, "context"),
        batch_size=_whole(values, "batch_size"),
        staging=_whole(values, "staging"),
        trace=PreparedTrace.of(values["trace"]) if values["trace"] else None,
    )
    print(found)
    if values["out"]:
        file = Path(values["out"])
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, found.to_json())
        print(file)
    if found.problems:
        raise UserError("; ".join(found.problems))
    return 0


def _top_k(values: Mapping[str, str], most: int) -> int:
    top_k = _whole(values, "top_k")
    if not 1 <= top_k <= most:
        raise UsageError(f"top_k={top_k}: from 1 to the model's {most} experts")
    return top_k


def _bytes(values: Mapping[str, str], key: str) -> int:
    from oled.errors import UserError
    from oled.sim.slots import parse_bytes

    try:
        return parse_bytes(values[key])
    except UserError as error:
        raise UsageError(f"{key}: {error}") from error


def _whole(values: Mapping[str, str], key: str) -> int:
    if not values[key].isdigit():
        raise UsageError(f"{key}={values[key]} is no whole number")
    return int(values[key])
