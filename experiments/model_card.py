"""Measure the bundled model again and put the tables into its card.

    python experiments/model_card.py --data ../shared/data/prompts/gsm8k

The prose of `oled/models/tiny/README.md` is written by hand. What stands between the lines
`<!-- NAME -->` and `<!-- /NAME -->` is replaced: run, loss, calibration, experts, dtypes,
locality, samples.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap

import tiny_locality
import tiny_measure
import torch
from export_tiny import RESULTS
from tiny_data import Corpus
from tiny_measure import HeldOut
from train_tiny import Recipe, held_out

from oled.models.bundled import load_tiny, tiny_path
from oled.models.llada2 import LLaDA2MoeModelLM
from oled.record.decode import BlockDiffusion
from oled.record.prompts import load_prompts

log = logging.getLogger("model_card")
SAMPLES = 6
LOCALITY_PROMPTS = 24
DTYPE_WINDOWS = 16  # half precision is slow on a CPU


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, figures to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def fill(card: str, name: str, text: str) -> str:
    """Replace what stands between the two markers of `name`."""
    start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
    if card.count(start) != 1 or card.count(stop) != 1:
        raise ValueError(f"the card needs exactly one {start} and one {stop}")
    before, rest = card.split(start)
    return f"{before}{start}\n{text}\n{stop}{rest.split(stop)[1]}"


def read_log() -> list[dict[str, float]]:
    """The training log, one entry an evaluation."""
    text = (RESULTS / "train_log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def run_line(train_tokens: int) -> str:
    """How long the training was."""
    last = read_log()[-1]
    return (
        f"The run: {last['step']:,} steps, {last['tokens'] / 1e6:.1f} M clean tokens "
        f"({last['tokens'] / train_tokens:.1f} times the data), {last['minutes']:.0f} minutes."
    )


def loss_table(rows: int = 12) -> str:
    """Held-out loss along the training log."""
    lines = read_log()
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


def samples(data: Path) -> str:
    """Free answers to the first held-out prompts, good or bad."""
    prompts = load_prompts(data / "test.jsonl", limit=SAMPLES)
    settings = BlockDiffusion(block_length=16, threshold=0.9, max_new_tokens=160)
    parts = []
    found = tiny_measure.answers(prompts, settings)
    for prompt, (text, forwards, ended) in zip(prompts, found, strict=True):
        end = "ended by itself" if ended else "cut off at 160 tokens"
        parts.append(f"{fenced(prompt.text + text)}\n\n{forwards} denoising forwards; {end}.")
    return "\n\n".join(parts)


def locality(data: Path) -> str:
    """Overlap, persistence by state and by confidence; the control beside them."""
    prompts = load_prompts(data / "test.jsonl", skip=SAMPLES, limit=LOCALITY_PROMPTS)
    found = tiny_locality.measure(prompts)
    names = tuple(found)
    forwards = ", ".join(f"{one.forwards} ({name})" for name, one in found.items())
    parts = [
        f"{len(prompts)} held-out problems, B 16; forwards recorded: {forwards}.",
        "Overlap of active sets (chance level in brackets):",
        table(("", *names, "paper"), tiny_locality.overlap_rows(found)),
        "A token's experts that are kept in the next forward (tokens; rank correlation ρ with its "
        "confidence):",
        table(("", *names), tiny_locality.state_rows(found)),
        "The same by confidence, forced (tokens):",
        table(
            ("confidence", "all", *(name.replace("_to_", " → ") for name in tiny_locality.STATES)),
            tiny_locality.confidence_rows(found["forced"]),
        ),
    ]
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


def dtype_table(exact: HeldOut, text: Corpus, recipe: Recipe) -> str:
    """How many routes survive computing in half precision."""
    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        narrow, _ = load_tiny(dtype=dtype)
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


def tables(data: Path) -> dict[str, str]:
    """All generated parts of the card."""
    recipe = Recipe()
    model, tokenizer = load_tiny()
    train = tiny_measure.corpus(data / "train.jsonl", tokenizer)
    test = tiny_measure.corpus(data / "test.jsonl", tokenizer)
    whole = tiny_measure.run_held_out(model, test, recipe, recipe.held_out_windows)
    part = tiny_measure.run_held_out(model, test, recipe, DTYPE_WINDOWS)
    shipped = ", ".join(f"{loss:.3f}" for loss in held_out(model, test, recipe).values())
    return {
        "run": run_line(len(train.stream)),
        "loss": f"{loss_table()}\n\nThe shipped weights, measured again: {shipped}.",
        "calibration": calibration_table(whole),
        "experts": experts_table(whole, model),
        "dtypes": dtype_table(part, test, recipe),
        "locality": locality(data),
        "samples": samples(data),
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    args = parser.parse_args()
    torch.set_num_threads(1)  # faster than two for matrices this small
    card = tiny_path() / "README.md"
    text = card.read_text(encoding="utf-8")
    for name, part in tables(args.data).items():
        text = fill(text, name, part)
    card.write_text(text, encoding="utf-8")
    log.info("%s", card)


if __name__ == "__main__":
    main()
