"""Measurements of the bundled model on held-out text, for its card.

Letters: W windows, S positions of a window, V vocabulary, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiny_data
import torch
from tiny_data import Corpus
from tiny_recipe import Recipe
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from oled.models.llada2 import LLaDA2MoeModelLM, LLaDA2TopKRouter
from oled.running.decode import BlockDiffusion
from oled.running.prompts import Prompt, tokenize
from oled.trace.schema import Phase

CONFIDENCE_EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What one dtype gives on the held-out windows at the shortest block length."""

    ids: Tensor  # [MoE layers, tokens, k], sorted within a token
    confidence: Tensor  # [masked positions]
    correct: Tensor  # bool [masked positions]


def corpus(path: Path, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    """A split of GSM8K as training saw it."""
    return Corpus.encode(tiny_data.load_documents(path), tokenizer)


@torch.no_grad()
def run_held_out(model: LLaDA2MoeModelLM, text: Corpus, recipe: Recipe, windows: int) -> HeldOut:
    """Routes and predictions on the first windows of the training log's held-out loss."""
    items = np.arange(windows)
    clean = text.windows(items, recipe.length, recipe.seed, shuffle=False)
    block = min(recipe.blocks)
    noise = tiny_data.stratified_noise(
        *clean.shape, block, np.random.default_rng((recipe.seed, block))
    )
    visible = tiny_data.doubled_mask(recipe.length, block)
    routers = [module for module in model.modules() if isinstance(module, LLaDA2TopKRouter)]
    seen: list[list[Tensor]] = [[] for _ in routers]
    hooks = [
        router.register_forward_hook(lambda _m, _i, output, rows=rows: rows.append(output[2]))
        for router, rows in zip(routers, seen, strict=True)
    ]
    best, truth = [], []
    for c, n in zip(clean.split(8), noise.split(8), strict=True):
        ids, positions = tiny_data.copies(c, n[:, None], model.config.mask_token_id)
        logits = model(ids, attention_mask=visible, position_ids=positions).logits
        best.append(logits[:, : c.shape[1]][n].float().softmax(-1).max(-1))
        truth.append(c[n])
    for hook in hooks:
        hook.remove()
    ids = torch.stack([torch.cat(rows) for rows in seen]).sort(-1).values
    confidence = torch.cat([b.values for b in best])
    correct = torch.cat([b.indices for b in best]) == torch.cat(truth)
    return HeldOut(ids, confidence, correct)


def experts_used(run: HeldOut, experts: int) -> list[tuple[int, int]]:
    """For each MoE layer: experts used at all, and routed tokens of the least used one."""
    counts = [layer.flatten().bincount(minlength=experts) for layer in run.ids]
    return [(int((count > 0).sum()), int(count.min())) for count in counts]


def same_routes(run: HeldOut, other: HeldOut) -> tuple[float, float]:
    """Shares of (token, expert) pairs and of whole top-k sets on which two runs agree."""
    both = (run.ids[..., :, None] == other.ids[..., None, :]).any(-1).float()
    return both.mean().item(), both.all(-1).float().mean().item()


def calibration(run: HeldOut) -> list[tuple[str, int, float, float]]:
    """By bin of confidence: its name, masked positions, mean confidence, accuracy."""
    rows = []
    for low, high in pairwise(CONFIDENCE_EDGES):
        here = (run.confidence >= low) & (run.confidence < high + (high == 1))
        name = f"{low:g}–{high:g}"
        mean, accuracy = run.confidence[here].mean(), run.correct[here].float().mean()
        rows.append((name, int(here.sum()), mean.item(), accuracy.item()))
    return rows


def answers(
    model: LLaDA2MoeModelLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    settings: BlockDiffusion,
) -> list[tuple[str, int, bool]]:
    """For each prompt the decoded answer, its denoise forwards, and whether it ended by itself."""
    settings = settings.resolve(model, tokenizer)
    found = []
    for request in tokenize(prompts, tokenizer):
        written: list[int] = []
        forwards = 0
        for one in settings.decode(model, [request]):
            forwards += one.phase is Phase.DENOISE
            if one.phase is not Phase.DENOISE:
                written += one.shares[0].token_ids.tolist()
        answer = written[len(request.prompt) :]
        ended = tokenizer.eos_token_id in answer
        if ended:
            answer = answer[: answer.index(tokenizer.eos_token_id)]
        found.append((tokenizer.decode(answer), forwards, ended))
    return found
