"""Train the bundled model's draft experts (DraftExpert, arXiv 2607.24434) on the frozen model.

    python experiments/training/train_draft_expert.py --data GSM8K --out .work/draft
    cp .work/draft/draft.safetensors oled/models/tiny/

A few minutes on one core. A draft expert is a SwiGLU for each MoE layer that stands in for all
routed experts but the best one; `oled record decode=speculative_blocks` drafts with it. Distilled
with logit KL, cross-entropy, residual MSE and router KL, as published; their weights, the text
(windows of GSM8K, masked as in the model's own training), width and length of the run are ours.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import tiny_attention
import tiny_data
import torch
from draft_distillation import Distillation, Weights
from predictor_features import routers_of
from tiny_data import Corpus
from torch import Tensor

from oled.models.llada2 import LLaDA2MoeModelLM
from oled.running.drafting import DraftExperts
from oled.running.loading import load_model
from oled.running.predictors import fingerprint, write_heads

log = logging.getLogger("train_draft_expert")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the draft experts, besides the model."""

    units: int = 2  # width of a draft expert, in routed experts
    steps: int = 400
    windows: int = 4  # of a step
    length: int = 128  # positions of a window
    block: int = 16
    rate: float = 3e-3  # of Adam; falls to zero like a cosine
    weights: Weights = field(default_factory=Weights)
    held_out: int = 16  # windows of the test split
    seed: int = 0


def new_experts(model: LLaDA2MoeModelLM, recipe: Recipe) -> DraftExperts:
    """Draft experts that add nothing yet."""
    config, generator = model.config, torch.Generator().manual_seed(recipe.seed)
    width, hidden = recipe.units * config.moe_intermediate_size, config.hidden_size
    layers = range(len(routers_of(model)))
    gate_up = tuple(
        torch.randn(2 * width, hidden, generator=generator) / hidden**0.5 for _ in layers
    )
    down = tuple(torch.zeros(hidden, width) for _ in layers)
    return DraftExperts(gate_up, down, torch.ones(len(layers)))


def batch(corpus: Corpus, recipe: Recipe, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Windows [W, S] and what is masked of them."""
    items = np.arange(step * count, (step + 1) * count)
    clean = corpus.windows(items, recipe.length, recipe.seed)
    rng = np.random.default_rng((recipe.seed, step))
    return clean, tiny_data.stratified_noise(*clean.shape, recipe.block, rng)


def train(model: LLaDA2MoeModelLM, corpus: Corpus, recipe: Recipe) -> DraftExperts:
    """The draft experts after so many steps; the model stays as it is."""
    experts = new_experts(model, recipe)
    learned = list(experts.tensors().values())
    for tensor in learned:
        tensor.requires_grad_()
    distillation = Distillation(model, experts, recipe.block)
    optimizer = torch.optim.Adam(learned, lr=recipe.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    for step in range(recipe.steps):
        loss = distillation.loss(*batch(corpus, recipe, step, recipe.windows), recipe.weights)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step + 1 == recipe.steps:
            log.info("step %d: loss %.4f", step, loss.item())
    return DraftExperts.of({n: t.detach() for n, t in experts.tensors().items()})


def train_draft_expert(data: Path, out: Path, recipe: Recipe) -> Path:
    """Train, judge on held-out windows, and write OUT/draft.safetensors with its card."""
    out.mkdir(parents=True, exist_ok=True)
    _, model, tokenizer, _ = load_model("tiny")
    model.requires_grad_(False)
    routers = fingerprint(routers_of(model))
    model.set_attn_implementation(tiny_attention.NAME)
    text = {
        split: Corpus.encode(tiny_data.load_documents(data / f"{split}.jsonl"), tokenizer)
        for split in ("train", "test")
    }
    test = batch(text["test"], recipe, 0, recipe.held_out)
    held_out = {"without": Distillation(model, None, recipe.block).judge(*test)}
    log.info("without draft experts: %s", held_out["without"])
    experts = train(model, text["train"], recipe)
    held_out["with"] = Distillation(model, experts, recipe.block).judge(*test)
    log.info("with them: %s", held_out["with"])
    card = {"routers": routers, "recipe": asdict(recipe), "held_out": held_out}
    file = out / "draft.safetensors"
    write_heads(file, experts.tensors(), card)
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="the draft experts and their card")
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument("--units", type=int, default=Recipe().units, help="width, in routed ones")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    recipe = Recipe(steps=args.steps, units=args.units)
    log.info("%s", train_draft_expert(args.data, args.out, recipe))


if __name__ == "__main__":
    main()
