"""Small runs of one budget, each with one thing changed: what moves the routing's statistics?

    python experiments/training/explore_tiny.py --data GSM8K --work .work/explore \\
        --start .work/tiny/checkpoint.pt

Runs what is missing in `experiments/results/tiny_model/runs.jsonl` (all, or the variations named
behind the options), and writes `runs.parquet` and `runs.md` of it. Every run has the same
seed and sees 0.25 M clean tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tiny_recipe import FIRST, Recipe, initial_model
from train_tiny import Budget, Trainer, prepare
from transformers import PreTrainedTokenizerFast

import oled
from oled.record import BlockDiffusion, LoadedModel, Mode, load_prompts, record
from oled.trace.stats import Locality, stats

log = logging.getLogger("explore_tiny")
RESULTS = Path(__file__).parents[1] / "results" / "tiny_model"
JOURNAL = RESULTS / "runs.jsonl"
STEPS, PROMPTS, NEW_TOKENS = 240, 6, 64
MIX = ("gsm8k", "python", "gsm8k", "docs")
BASE = replace(FIRST, windows=4)
MORE = replace(BASE, learning_rate=1.5e-3, warmup_steps=20, flat_until=0.3)

VARIATIONS: dict[str, Recipe] = {  # those called base begin with nothing, the others with `--start`
    "more of the same": MORE,
    "half code and docs": replace(MORE, text=MIX),
    "alignment 0.3": replace(MORE, alignment=0.3),
    "alignment 1": replace(MORE, alignment=1.0),
    "alignment 0.3, text, complement": replace(MORE, alignment=0.3, text=MIX, complement=True),
    "slack 0.8": replace(MORE, balance_slack=0.8),
    "muon": replace(MORE, muon=True),
    "sharpening 0.3": replace(MORE, sharpening=0.3),
    "complement": replace(MORE, complement=True),
    "mask frozen": replace(MORE, mask_frozen=True),
    "mask from the mean": replace(MORE, mask_mean=True),
    "mask from the mean, frozen": replace(MORE, mask_mean=True, mask_frozen=True),
    "masked tokens load 4": replace(MORE, balance_masked=4.0),
    "base": BASE,
    "base, muon": replace(BASE, muon=True),
    "base, E 192, k 4": replace(BASE, num_experts=192),
    "base, E 128, k 3": replace(BASE, experts_per_token=3),
    "base, E 256, k 8, width 16": replace(
        BASE, num_experts=256, experts_per_token=8, expert_width=16
    ),
    "base, blocks 4 and 8 first": replace(BASE, first_blocks=(4, 8), first_until=0.4),
    "base, autoregressive first": replace(BASE, autoregressive_until=0.4),
    "base, two dense layers": replace(BASE, dense_layers=2, moe_layers=3),
    "base, dense width 1024": replace(BASE, dense_width=1024),
}

MEASURES = {  # column: title in the table
    "held_out_b16": "held out, B 16",
    "held_out_b32": "B 32",
    "cpu_s_per_step": "CPU s a step",
    "active_share": "active share, free",
    "adjacent_of_new": "neighbours, of the newer",
    "adjacent_of_old": "of the older",
    "boundary_of_new": "boundary, of the newer",
    "boundary_of_old": "of the older",
    "forced_active_share": "active share, forced",
    "forced_boundary_of_new": "boundary forced, of the newer",
    "forced_boundary_of_old": "of the older",
    "masked_to_decoded": "kept when opened, forced",
    "tokens_per_forward_0.9": "tokens a forward, 0.9",
    "tokens_per_forward_0.95": "0.95",
    "gain_confidence": "confidence x gate over gate, points",
    "gain_state": "state over gate",
    "gain_lru": "LRU over gate",
}
CHANCES = ("adjacent_of_new", "adjacent_of_old", "boundary_of_new", "boundary_of_old")


def of_sets(found: Locality, prefix: str) -> dict[str, Any]:
    """Active share and overlaps, each with its chance level."""
    overlap = found.overlap[1]
    row = {
        "active_share": found.active.share.value,
        "adjacent_of_new": overlap.of_new.value,
        "adjacent_of_new_chance": overlap.chance_of_new,
        "adjacent_of_old": overlap.of_old.value,
        "adjacent_of_old_chance": overlap.chance_of_old,
    }
    boundary = found.boundary.after_denoise
    if boundary is not None:
        row |= {
            "boundary_of_new": boundary.of_new.value,
            "boundary_of_new_chance": boundary.chance_of_new,
            "boundary_of_old": boundary.of_old.value,
            "boundary_of_old_chance": boundary.chance_of_old,
        }
    return {prefix + name: value for name, value in row.items()}


def hit_rates(trace: Path) -> dict[str, float]:
    """Points of hit rate over the plain gate sum, a quarter of the experts resident."""
    rates = {
        policy: oled.simulate(trace, policy, slots=0.25, staging="unbounded").metrics["hit_rate"]
        for policy in ("gate_sum", "oled_priority", "state_gate", "inter_iteration")
    }
    gate = rates.pop("gate_sum")
    names = ("gain_confidence", "gain_state", "gain_lru")
    return {n: 100 * (rate - gate) for n, rate in zip(names, rates.values(), strict=True)}


def measure(loaded: LoadedModel, data: Path) -> dict[str, Any]:
    """Statistics on held-out problems at B 16, as the model writes and along the answers."""
    prompts = load_prompts(data / "test.jsonl", limit=PROMPTS)
    free = BlockDiffusion(block_length=16, threshold=0.9, max_new_tokens=NEW_TOKENS)
    settings = {
        "free": free,
        "sure": replace(free, threshold=0.95),
        "forced": replace(free, mode=Mode.FORCED, tokens_per_forward=2),
    }
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, decode in settings.items():
            record(loaded, prompts, decode, Path(folder) / name)
            found[name] = stats(Path(folder) / name)
        gains = hit_rates(Path(folder) / "forced")
    kept = found["forced"].persistence.by_transition
    return {
        **of_sets(found["free"], ""),
        **of_sets(found["forced"], "forced_"),
        "tokens_per_forward_0.9": found["free"].tokens_per_forward.value,
        "tokens_per_forward_0.95": found["sure"].tokens_per_forward.value,
        **{f"{name}": share for name, share in kept.items()},
        **gains,
    }


def run(name: str, recipe: Recipe, data: Path, work: Path, start: Path) -> dict[str, Any]:
    """Train one variation (or go on with it), then measure it."""
    out = work / name.replace(" ", "_").replace(",", "")
    out.mkdir(parents=True, exist_ok=True)
    text, test = prepare(data, work / "text", recipe)
    begin = None if name.startswith("base") else start
    trainer = Trainer(
        out, recipe, Budget(STEPS, evaluate_every=STEPS, checkpoint_every=STEPS), text, test, begin
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    trainer.run()
    cpu_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    losses = json.loads((out / "train_log.jsonl").read_text().splitlines()[-1])
    model = initial_model(recipe)
    model.load_state_dict(trainer.model.state_dict())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "text" / "tokenizer")
    found = measure(LoadedModel(name, model.eval(), tokenizer, torch.float32), data)
    return {
        "variation": name,
        **{key: losses[key] for key in ("held_out_b16", "held_out_b32", "load_entropy")},
        "steps": STEPS,
        "tokens": losses["tokens"],
        "cpu_s_per_step": cpu_s / STEPS,
        **found,
        "recipe": asdict(recipe),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a column for each run, chance levels in brackets."""
    lines = ["| | " + " | ".join(row["variation"] for row in rows) + " |"]
    lines.append("| --- |" + " ---: |" * len(rows))
    for key, title in MEASURES.items():
        cells = []
        for row in rows:
            chance = row.get(f"{key}_chance")
            value = row.get(key)
            digits = f"{value:+.2f}" if key.startswith("gain") else f"{value:.3f}"
            cells.append(digits + ("" if chance is None else f" ({chance:.2f})"))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def read() -> list[dict[str, Any]]:
    """All runs so far, in the order of `VARIATIONS`."""
    text = JOURNAL.read_text(encoding="utf-8") if JOURNAL.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    return sorted(rows, key=lambda row: list(VARIATIONS).index(row["variation"]))


def write(rows: list[dict[str, Any]]) -> None:
    """The table for people and for programs."""
    flat = [{**row, "recipe": json.dumps(row["recipe"])} for row in rows]
    pd.DataFrame(flat).to_parquet(RESULTS / "runs.parquet")
    (RESULTS / "runs.md").write_text(table(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and tokenized text")
    parser.add_argument("--start", type=Path, required=True, help="the first model's checkpoint")
    parser.add_argument("names", nargs="*", help="variations; all by default")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    for name in args.names or VARIATIONS:
        if name in {row["variation"] for row in read()}:
            continue
        row = run(name, VARIATIONS[name], args.data, args.work, args.start)
        with JOURNAL.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        log.info("%s", {key: row[key] for key in MEASURES})
        write(read())


if __name__ == "__main__":
    main()
