"""Measure the bundled model again and put the tables into its card and into docs/locality.md.

    python experiments/training/model_card.py --data GSM8K

The prose of both is written by hand. What stands between the lines `<!-- NAME -->` and
`<!-- /NAME -->` is replaced, wherever it occurs: run, loss, calibration, experts, dtypes,
free, forced, persistence, samples, policies. `--only NAME …` measures no more than these;
`--traces DIR` keeps the recordings, and uses those that are there.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from textwrap import wrap

import tiny_attention
import tiny_locality
import tiny_measure
import tiny_policies
import torch
from export_tiny import RESULTS
from tiny_data import Corpus
from tiny_measure import HeldOut
from tiny_objective import held_out
from tiny_recipe import Recipe
from transformers import PreTrainedTokenizerFast

from oled.models.llada2 import LLaDA2MoeModelLM
from oled.paths import model_path
from oled.record import LoadedModel
from oled.running.decode import BlockDiffusion
from oled.running.prompts import load_prompts
from oled.trace.stats import Locality

log = logging.getLogger("model_card")
DOCS = Path(__file__).parents[2] / "docs" / "locality.md"
CONTROL = tiny_locality.name_of(tiny_locality.CONTROL, 16)
BLOCKS = tiny_locality.BLOCKS
SAMPLES = 6
LOCALITY_PROMPTS = 24
DTYPE_WINDOWS = 16  # half precision is slow on a CPU


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, figures to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def fill(text: str, name: str, part: str) -> str:
    """Replace what stands between the two markers of `name`, if they are there."""
    start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(start) != text.count(stop) or text.count(start) > 1:
        raise ValueError(f"there must be at most one {start} and one {stop}")
    if start not in text:
        return text
    before, rest = text.split(start)
    return f"{before}{start}\n{part}\n{stop}{rest.split(stop)[1]}"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Weights and tokenizer of a folder that `export_tiny.py` wrote."""
    model = LLaDA2MoeModelLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return LoadedModel("tiny", model, tokenizer, torch.float16)


def read_log(file: Path) -> list[dict[str, float]]:
    """The training log, one entry an evaluation."""
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def run_line(file: Path) -> str:
    """How long the training was."""
    last = read_log(file)[-1]
    return (
        f"The run: {last['step']:,} steps, {last['tokens'] / 1e6:.1f} M clean tokens, "
        f"{last['minutes']:.0f} minutes."
    )


def loss_table(file: Path, rows: int = 12) -> str:
    """Held-out loss along the training log."""
    lines = read_log(file)
    step = max(1, -(-(len(lines) - 1) // rows))
    chosen = [*lines[:-1:step], lines[-1]]
    header = ("step", "minutes", "tokens (M)", "held out, B 16", "held out, B 32", "load entropy")
    return table(
        header,
        (
            (
                line["step"],
                f"{line['minutes']:.1f}",
                f"{line['tokens'] / 1e6:.2f}",
                f"{line['held_out_b16']:.3f}",
                f"{line['held_out_b32']:.3f}",
                f"{line['load_entropy']:.3f}",
            )
            for line in chosen
        ),
    )


def fenced(text: str) -> str:
    """Verbatim: dollar signs and calculator marks mean something to Markdown."""
    lines = [wrapped for line in text.strip().splitlines() for wrapped in wrap(line, 96)]
    return "\n".join(["```text", *lines, "```"])


def samples(loaded: LoadedModel, data: Path) -> str:
    """Free answers to the first held-out prompts, good or bad."""
    prompts = load_prompts(data / "test.jsonl", limit=SAMPLES)
    settings = BlockDiffusion(block_length=16, threshold=0.9, max_new_tokens=160)
    parts = []
    found = tiny_measure.answers(loaded.model, loaded.tokenizer, prompts, settings)
    for prompt, (text, forwards, ended) in zip(prompts, found, strict=True):
        end = "ended by itself" if ended else "cut off at 160 tokens"
        parts.append(f"{fenced(prompt.text + text)}\n\n{forwards} denoising forwards; {end}.")
    return "\n\n".join(parts)


class Recordings:
    """The held-out problems recorded in all ways, when they are first asked for."""

    def __init__(self, loaded: LoadedModel, data: Path, folder: Path) -> None:
        self.loaded = loaded
        self.prompts = load_prompts(data / "test.jsonl", skip=SAMPLES, limit=LOCALITY_PROMPTS)
        self.folder = folder

    @cached_property
    def paths(self) -> dict[str, Path]:
        return tiny_locality.record_all(self.loaded, self.prompts, self.folder)

    @cached_property
    def found(self) -> dict[str, Locality]:
        return tiny_locality.measure(self.paths)

    def of(self, mode: str) -> dict[str, Locality]:
        names = [tiny_locality.name_of(mode, block) for block in tiny_locality.BLOCKS]
        return {name: self.found[name] for name in names}


def overlaps(recordings: Recordings, mode: str) -> str:
    """Overlap, boundaries, active sets and tokens a forward at all block lengths."""
    found = recordings.of(mode)
    if mode == "forced":
        found[CONTROL] = recordings.found[CONTROL]
    forwards = ", ".join(f"{one.forwards} ({name})" for name, one in found.items())
    published = tiny_locality.Published()
    return "\n\n".join(
        (
            f"{len(recordings.prompts)} held-out problems; forwards recorded: {forwards}.",
            table(("", *found, "published"), tiny_locality.overlap_rows(found, published)),
        )
    )


def persistence(recordings: Recordings) -> str:
    """What becomes of a token's experts, by state and by confidence."""
    found = {
        name: recordings.found[name]
        for name in (*(tiny_locality.name_of(m, 16) for m in ("free", "forced")), CONTROL)
    }
    forced = recordings.found[tiny_locality.name_of("forced", 16)]
    parts = [
        "A token's experts that are kept in the next forward (tokens; rank correlation ρ with its "
        "confidence):",
        table(("", *found), tiny_locality.state_rows(found)),
        "The same by confidence, forced (tokens):",
        table(
            (
                "confidence",
                "all",
                "masked",
                *(name.replace("_to_", " → ") for name in tiny_locality.STATES),
            ),
            tiny_locality.confidence_rows(forced),
        ),
    ]
    return "\n\n".join(parts)


def policies(recordings: Recordings) -> str:
    """Hit rates at three cache sizes, forced and free."""
    parts = []
    for mode in ("forced", "free"):
        name = tiny_locality.name_of(mode, 16)
        rankings = tiny_policies.rank(recordings.paths[name])
        header = [""]
        for ranking in rankings:
            header += [f"{ranking.share:.0%} of the experts", "points over the gate"]
        parts.append(f"{name[0].upper()}{name[1:]}:")
        parts.append(table(header, tiny_policies.rows(rankings)))
        parts.append(
            table([tiny_policies.CONFIDENCE, *header[1::2]], tiny_policies.contrasts(rankings))
        )
    return "\n\n".join(parts)


def experts_table(run: HeldOut, model: LLaDA2MoeModelLM) -> str:
    """Experts used, and how evenly, by layer."""
    experts, first = model.config.num_experts, model.config.first_k_dense_replace
    mean = round(run.ids[0].numel() / experts)
    used = enumerate(tiny_measure.experts_used(run, experts), start=first)
    return table(
        ("layer", "experts used", "pairs of the least used", "pairs if all were equal"),
        ((layer, f"{number} of {experts}", least, mean) for layer, (number, least) in used),
    )


def dtype_table(folder: Path, exact: HeldOut, text: Corpus, recipe: Recipe) -> str:
    """How many routes survive computing in half precision."""
    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        narrow = load(folder, dtype).model
        other = tiny_measure.run_held_out(narrow, text, recipe, DTYPE_WINDOWS)
        pairs, sets = tiny_measure.same_routes(exact, other)
        rows.append((str(dtype).removeprefix("torch."), f"{pairs:.2%}", f"{sets:.2%}"))
    return table(("computed in", "same expert of a token", "same four experts"), rows)


def calibration_table(run: HeldOut) -> str:
    """Accuracy by confidence."""
    return table(
        ("confidence", "masked tokens", "mean confidence", "accuracy"),
        (
            (name, count, f"{confidence:.2f}", f"{accuracy:.2f}")
            for name, count, confidence, accuracy in tiny_measure.calibration(run)
        ),
    )


def makers(folder: Path, history: Path, data: Path, traces: Path) -> dict[str, Callable[[], str]]:
    """All generated parts, each of them made when it is called for."""
    recipe = Recipe()
    loaded = load(folder)
    model, tokenizer = loaded.model, loaded.tokenizer
    test = tiny_measure.corpus(data / "test.jsonl", tokenizer)
    recordings = Recordings(loaded, data, traces)

    def whole() -> HeldOut:
        return tiny_measure.run_held_out(model, test, recipe, recipe.held_out_windows)

    def loss() -> str:
        trained = load(folder).model
        trained.set_attn_implementation(tiny_attention.NAME)
        losses = held_out(trained, test, recipe, BLOCKS, recipe.held_out_windows)
        shipped = ", ".join(f"{loss:.3f}" for loss in losses.values())
        again = f"The shipped weights at B 8, 16, 32, measured again: {shipped}."
        return f"{loss_table(history)}\n\n{again}"

    def dtypes() -> str:
        part = tiny_measure.run_held_out(model, test, recipe, DTYPE_WINDOWS)
        return dtype_table(folder, part, test, recipe)

    return {
        "run": lambda: run_line(history),
        "loss": loss,
        "calibration": lambda: calibration_table(whole()),
        "experts": lambda: experts_table(whole(), model),
        "dtypes": dtypes,
        "free": lambda: overlaps(recordings, "free"),
        "forced": lambda: overlaps(recordings, "forced"),
        "persistence": lambda: persistence(recordings),
        "policies": lambda: policies(recordings),
        "samples": lambda: samples(loaded, data),
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument(
        "--model", type=Path, default=model_path(), help="its folder, with its card"
    )
    parser.add_argument("--log", type=Path, default=RESULTS / "train_log.jsonl")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the page on locality")
    parser.add_argument("--only", nargs="*", help="parts to measure; all by default")
    parser.add_argument("--traces", type=Path, help="where recordings are kept")
    args = parser.parse_args()
    torch.set_num_threads(1)  # faster than two for matrices this small
    with tempfile.TemporaryDirectory() as temporary:
        parts = makers(args.model, args.log, args.data, args.traces or Path(temporary))
        for name in args.only or parts:
            part = parts[name]()
            for page in (args.model / "README.md", args.docs):
                text = page.read_text(encoding="utf-8")
                page.write_text(fill(text, name, part), encoding="utf-8")
            log.info("%s", name)


if __name__ == "__main__":
    main()
