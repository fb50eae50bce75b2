"""The verbs that size a machine: profile, fit; and demo. Their arguments are plain key=value."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

from oled.cli import runs
from oled.cli.keys import KEYS
from oled.cli.usage import UsageError
from oled.cli.verbs import read_words

VERBS = {
    "demo": "the whole job on the bundled model: record, check, replay, compare",
    "profile": "measure this machine into a hardware profile",
    "fit": "what of a model fits a GPU and its host, and how many experts stay",
}


def run(verb: str, arguments: list[str]) -> int:
    """Run a verb whose arguments are key=value."""
    runs.quiet_bars()
    values = read_words(KEYS[verb], arguments)
    return {"demo": _demo, "profile": _profile, "fit": _fit}[verb](values)


def _demo(values: dict[str, Any]) -> int:
    from oled.results.claims import claimed
    from oled.studies.demo import demo

    runs.log_to_stderr()
    with claimed(Path(values["out"])):
        print(demo(Path(values["out"]), device=values["device"]))
    return 0


def _profile(values: dict[str, Any]) -> int:
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
    if values["top_k"] is not None:
        if values["top_k"] > model.num_experts:
            raise UsageError(
                f"top_k={values['top_k']}: from 1 to the model's {model.num_experts} experts"
            )
        model = dataclasses.replace(model, top_k=values["top_k"])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    beside = out.with_suffix(".experts") if values["link"] == "storage" else None
    with bench_of(values["backend"], model, values["link"], beside) as bench:
        profile = measure(bench, model, today)
    file = write_profile(profile, out)
    absent = [f"  absent: {what}: {why}" for what, why in profile["absent"].items()]
    print("\n".join([describe(load_profile(profile), model), *absent, str(file)]))
    return 0


def _fit(values: dict[str, Any]) -> int:
    from oled.advise.fit import fit
    from oled.errors import UserError
    from oled.models.catalogue import model_geometry
    from oled.results.table import write_json
    from oled.sim.prepared import PreparedTrace

    found = fit(
        model_geometry(values["model"]),
        _bytes(values, "gpu_memory"),
        _bytes(values, "host_memory"),
        values["context"],
        batch_size=values["batch_size"],
        staging=values["staging"],
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


def _bytes(values: dict[str, Any], key: str) -> int:
    from oled.errors import UserError
    from oled.sim.slots import parse_bytes

    try:
        return parse_bytes(values[key])
    except UserError as error:
        raise UsageError(f"{key}: {error}") from error
