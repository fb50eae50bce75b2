"""From the composed configuration of `quality` and `paths` to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oled.cli.jobs import Done, Values, checkpoint, decoding, rule_of
from oled.errors import UserError
from oled.results import table as results

if TYPE_CHECKING:
    from oled.quality.measure import Quality
    from oled.record import LoadedModel
    from oled.running.alteration import Alteration


def quality(values: Values, out: Path) -> Done:
    """Measure a model with and without a change of its experts: OUT/quality.json."""
    from oled import record
    from oled.paths import traces_dir
    from oled.quality.measure import quality

    if (values["policy"] is None) == (values["paths"] is None):
        raise UserError("give what changes the experts: policy=NAME or paths=FILE.npz")
    source = values["prompts"] or traces_dir() / "prompts.jsonl"
    prompts = record.load_prompts(source, skip=values["skip"], limit=values["limit"])
    loaded = checkpoint(values["model"], values["model"]["device"])
    alteration = _alteration(values, loaded)
    found = quality(
        loaded,
        prompts,
        decoding(values["decode"]),
        alteration,
        chat=values["chat"],
        free=values["free"],
        seed=values["seed"],
    )
    return _written(out, found, alteration)


def paths(values: Values, out: Path) -> Done:
    """Record a model on pruned paths, or make up paths for a trace: OUT/trace."""
    return _made_up(values, out) if values["trace"] is not None else _pruned(values, out)


def _alteration(values: Values, loaded: LoadedModel) -> Alteration:
    from oled.quality.split_experts import SplitExperts, load_paths
    from oled.running.rerouting import Rerouting

    if values["policy"] is not None:
        return Rerouting(loaded.model, rule_of(values["policy"]))
    return SplitExperts(loaded.model, load_paths(Path(values["paths"])))


def _written(out: Path, found: Quality, alteration: Alteration) -> Done:
    out.mkdir(parents=True, exist_ok=True)
    file = out / "quality.json"
    summary = {**alteration.summary(), **found.summary()}
    results.write_json(file, summary)
    return Done("\n".join([str(alteration), *found.lines(), str(file)]), summary)


def _made_up(values: Values, out: Path) -> Done:
    from oled.altered.split import PathPlan, write_split_trace
    from oled.sweeps.configuration import source_of
    from oled.sweeps.simulation import folder_of
    from oled.trace import read_manifest

    folder = folder_of(source_of(values["trace"]))
    geometry = read_manifest(folder).geometry
    experts, top_k = geometry.experts_per_layer, geometry.top_k
    plan = PathPlan.at_random(experts, values["share"], top_k, values["seed"])
    done = write_split_trace(folder, out / "trace", plan)
    return Done(f"{plan}\n{done}", {"trace": str(done)})


def _pruned(values: Values, out: Path) -> Done:
    from oled import record
    from oled.record.split_experts import record_split_experts

    learn = values["learn"]
    for key, value in (("learn.prompts", learn["prompts"]), ("prompts", values["prompts"])):
        if value is None:
            raise UserError(f"{key} must be given")
    done = record_split_experts(
        checkpoint(values["model"], values["model"]["device"]),
        record.load_prompts(learn["prompts"], skip=learn["skip"], limit=learn["limit"]),
        record.load_prompts(values["prompts"], skip=values["skip"], limit=values["limit"]),
        decoding(values["decode"]),
        values["tolerance"],
        out,
        chat=values["chat"],
        free=values["free"],
        seed=values["seed"],
    )
    quality = _written(out, done.quality, done.split)
    lines = [quality.text, done.paths, done.recorded, done.trace]
    return Done("\n".join(map(str, lines)), quality.figures)
