"""Jobs of the verbs that run live: from a composed configuration to calls, and results to files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oled.cli.jobs import Done, Values, checkpoint, decoding
from oled.errors import UserError
from oled.results import table as results

if TYPE_CHECKING:
    from oled.live.backends.kind import Kind
    from oled.models.catalogue import ModelGeometry
    from oled.policies.composition import Composition
    from oled.sim.settings import Settings

PRESETS: dict[str, dict[str, Any]] = {
    "short": {
        "policies": ("naive_lru", "lru", "lfu", "fiddler", "hybrimoe", "oled", "tide"),
        "slots": (20, 50),
        "forwards": 10,
        "budget_s": 34.0,
    },
    "full": {
        "policies": (
            "naive_lru", "lru", "lfu", "inter_iteration", "least_stale", "cpu_all", "fiddler",
            "ktransformers", "llama_cpp_cache", "tide", "tide_artefact", "dali", "saem",
            "mixtral_offloading", "moe_infinity", "finemoe", "promoe", "hybrimoe",
            "hybrimoe_artefact", "oled_priority", "oled_layeradapt", "oled", "oled_exact",
            "oled_fill", "oled_exact_fill",
        ),
        "slots": (10, 20, 50),
        "forwards": 24,
        "budget_s": 900.0,
    },
}  # fmt: skip


def _settings(values: Values, slots: Any) -> Settings:
    from oled.sim.settings import Settings

    cost = {key: value for key, value in values["cost"].items() if key != "geometry"}
    return Settings(
        **{**values["cache"], "slots": slots}, **cost, **values["workload"], seed=values["seed"]
    )


def _geometry(values: Values) -> ModelGeometry | None:
    from oled.models.catalogue import model_geometry

    name = values["cost"]["geometry"]
    return None if name is None else model_geometry(name)


def _backend(values: Values, out: Path) -> Kind[Any]:
    """Return the backend; link=storage has its experts in OUT/experts.bin if no file is named."""
    from oled.live.backends.kinds import backend_kind

    backend, link, file = values["backend"], values["link"], values["expert_file"]
    if backend != "cpu" and link == "memory" and file is None:
        return backend_kind(backend)
    if file is None and link == "storage":
        file = out / "experts.bin"
    return backend_kind(backend, link, None if file is None else Path(file))


@contextmanager
def _removing(values: Values, kind: Kind[Any]) -> Iterator[None]:
    """Remove an expert file that nobody named when the run is over."""
    try:
        yield
    finally:
        if kind.expert_file is not None and values["expert_file"] is None:
            kind.expert_file.unlink(missing_ok=True)


def validate(values: Values, out: Path) -> Done:
    """Validate: OUT/report.json, OUT/validate.png. Raises UserError for a verdict of fail."""
    from oled.hardware import load_profile, load_runtime
    from oled.trace import load
    from oled.validate import report
    from oled.validate.pace import Pace
    from oled.validate.pairs import Plan
    from oled.validate.run import validate

    kind = _backend(values, out)
    pace = Pace(**values["pace"]) if kind.keeps_time else Pace(1.0, values["pace"]["kept"])
    preset = PRESETS[values["preset"]]
    slots = values["cache"]["slots"]
    many = slots if isinstance(slots, list) else preset["slots"] if slots is None else [slots]
    plan = Plan(
        policies=tuple(values["policies"] or preset["policies"]),
        slots=tuple(many),
        forwards=values["forwards"] or preset["forwards"],
        repeats=values["repeats"],
        budget_s=preset["budget_s"],
    )
    with kind.failures(), _removing(values, kind):
        found = validate(
            load(_folder_of(values["trace"])),
            plan,
            load_profile(values["hardware"]),
            load_runtime(values["runtime"]),
            pace,
            _settings(values, plan.slots[0]),
            kind=kind,
            calibration=_calibration_of(values),
            geometry=_geometry(values),
            gated=values["gated"],
        )
    files = report.write(found, out)
    text = "\n".join([report.text(found), *map(str, files)])
    if found["verdict"] == "fail":
        print(text)
        raise UserError(f"validation failed: {found['reasons'][0]}")
    return Done(text, found)


def run(values: Values, out: Path) -> Done:
    """Run a model's decoding, or a trace's routing, with offloaded experts: OUT/run.json."""
    from oled.policies.composition import load_composition

    kind = _backend(values, out)
    composition = load_composition(values["policy"])
    settings = _settings(values, values["cache"]["slots"])
    run_what = _run_model if values["trace"] is None else _run_trace
    with kind.failures(), _removing(values, kind):
        return run_what(values, out, composition, settings, kind)


def _run_model(
    values: Values, out: Path, composition: Composition, settings: Settings, kind: Kind[Any]
) -> Done:
    from oled import record
    from oled.hardware import load_profile, load_runtime
    from oled.live.decoded import LiveRun, simulate_run
    from oled.live.run import Machine, live_run
    from oled.paths import traces_dir
    from oled.quality.approximated import Exact, approximations, comparable
    from oled.sim.calibration import Calibration
    from oled.sim.prepared import PreparedTrace

    source = values["prompts"] or traces_dir() / "prompts.jsonl"
    prompts = record.load_prompts(source, skip=values["skip"], limit=values["limit"])
    machine = Machine(
        load_profile(values["hardware"]),
        load_runtime(values["runtime"]),
        _geometry(values),
        values["paced"],
    )
    learned = None
    if values["calibration"] is not None:
        learned = Calibration.from_steps(PreparedTrace.of(values["calibration"]).steps)
    loaded = checkpoint(_in_numbers_of(kind, values["model"]), "cpu")
    decode = decoding(values["decode"])
    judges = composition.dispatch.drops and values["quality"]
    judged = comparable(prompts, decode) if judges else None

    def live(policy: Composition, loop: Any, stand_in: bool) -> LiveRun:
        known = (policy, settings, machine, learned, kind, values["heads"])
        return live_run(loaded, prompts, loop, *known, stand_in=stand_in)

    done = live(composition, decode, True)
    simulated, difference = simulate_run(done, composition, settings, learned)
    summary = {**done.summary(), "decisions_identical": difference is None, "texts": done.texts}
    lines = [
        *(f"> {text}" for text in done.texts),
        f"policy {composition.name}, cache.slots={settings.slots}: {done.preflight}",
        *done.lines(),
        "decisions: the simulator's" if difference is None else f"decisions DIFFER: {difference}",
    ]
    if judged is not None:
        exact = Exact.of(loaded, prompts, judged, live)
        found = approximations(exact, composition, live, done)
        for name, one in found.items():
            lines += [f"{name} in the place of what is given up", *one.lines()]
        summary["given_up"] = {name: one.summary() for name, one in found.items()}
    if values["timeline"] is not None:
        file = done.write_timeline(Path(values["timeline"]), composition.name, simulated)
        lines.append(str(file))
    return _written(out, summary, lines, difference)


def _run_trace(
    values: Values, out: Path, composition: Composition, settings: Settings, kind: Kind[Any]
) -> Done:
    from oled.hardware import load_profile, load_runtime
    from oled.live.run_trace import run_trace

    done = run_trace(
        _folder_of(values["trace"]),
        composition,
        settings,
        load_profile(values["hardware"]),
        load_runtime(values["runtime"]),
        _geometry(values),
        kind=kind,
        paced=values["paced"],
        forwards=values["forwards"],
        calibration=_calibration_of(values),
    )
    lines = list(done.lines())
    if values["timeline"] is not None:
        lines.append(str(done.write_timeline(Path(values["timeline"]), composition.name)))
    return _written(out, done.summary(), lines, done.difference)


def _folder_of(trace: Values) -> Path:
    """Return the folder of a trace; make a made-up one first."""
    from oled.sweeps.configuration import source_of
    from oled.sweeps.simulation import folder_of

    return folder_of(source_of(trace))


def _calibration_of(values: Values) -> str | None:
    """Return the one given; for a made-up trace other requests of its model."""
    from oled.sweeps.configuration import source_of

    source = source_of(values["trace"])
    if values["calibration"] is not None or isinstance(source, str):
        given: str | None = values["calibration"]
        return given
    return str(source.calibration().folder())


def _in_numbers_of(kind: Kind[Any], model: Values) -> Values:
    """Keep the checkpoint's numbers where a backend takes them, though it is loaded on the CPU."""
    keeps = model["dtype"] == "auto" and len(kind.numbers) > 1
    return {**model, "dtype": "stored"} if keeps else model


def _written(out: Path, summary: Values, lines: list[str], difference: str | None) -> Done:
    out.mkdir(parents=True, exist_ok=True)
    file = out / "run.json"
    results.write_json(file, summary)
    text = "\n".join([*lines, str(file)])
    if difference is not None:
        print(text)
        raise UserError(f"live and simulated decisions differ: {difference}")
    return Done(text, summary)
