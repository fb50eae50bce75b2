"""SPICE's drafts while they learn: z + B·A·z from layer to layer, read by the frozen routers.

Letters: L MoE layers, N tokens, h hidden size, E experts, r rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from predictor_bench import Bench, Recipe, recall, train
from predictor_features import Features
from torch import Tensor
from torch.nn import functional

from oled.running.predictors import draft, selection

log = logging.getLogger("train_predictors")


class Drafts:
    """The drafts while they learn: A and B of every hop, and the sharpness by layers ahead."""

    def __init__(self, bench: Bench, recipe: Recipe) -> None:
        self.bench, self.recipe = bench, recipe
        hops, hidden = len(bench.routers) - 1, bench.train.hidden.shape[2]
        generator = torch.Generator().manual_seed(recipe.seed)
        first = torch.randn(hops, recipe.rank, hidden, generator=generator) / hidden**0.5
        self.down = list(first)
        self.up = [torch.zeros(hidden, recipe.rank) for _ in range(hops)]  # corrects nothing yet
        self.sharpness = torch.full((hops,), recipe.sharpness)
        for tensor in self.learned:
            tensor.requires_grad_()

    @property
    def learned(self) -> list[Tensor]:
        return [*self.down, *self.up, self.sharpness]

    def say(self, data: Features, batch: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(layers ahead, row, drafted gate input, what its router selects by, sharpened)."""
        for row in self.bench.layers[:-1]:
            z = data.hidden[row, batch].float()
            for target in self.bench.layers[row + 1 :]:
                z = draft(z, self.down[target - 1], self.up[target - 1])
                logits = functional.linear(z, self.bench.weight(target))
                chooses = selection(self.bench.scoring, self.bench.routers[target], logits)
                yield target - row, target, z, chooses * self.sharpness[target - row - 1]

    def loss(self, data: Features, batch: Tensor) -> Tensor:
        """Route cross-entropy against the applied shares, and hidden alignment."""
        losses = []
        for _, target, z, chooses in self.say(data, batch):
            shares, true = shares_of(data, target, batch, chooses), data.hidden[target, batch]
            distance = functional.mse_loss(z, true.float())
            routes = functional.cross_entropy(chooses, shares)
            losses.append(routes + self.recipe.alignment * distance)
        return torch.stack(losses).mean()

    @torch.no_grad()
    def judge(self) -> dict[int, dict[str, float]]:
        """Held out, by layers ahead: loss, recall of the routed experts, their predicted mass and
        the mass that they have."""
        data = self.bench.test
        every = torch.arange(data.hidden.shape[1])
        found: dict[int, list[list[float]]] = {}
        for ahead, target, _, chooses in self.say(data, every):
            truth, shares = data.ids[target], shares_of(data, target, every, chooses)
            best = chooses.topk(truth.shape[1], dim=-1).indices
            said, had = (x.gather(1, best).sum(1).mean() for x in (chooses.softmax(-1), shares))
            loss = functional.cross_entropy(chooses, shares)
            row = [loss.item(), recall(best.short(), truth), said.item(), had.item()]
            found.setdefault(ahead, []).append(row)
        names = ("loss", "recall", "mass_predicted", "mass")
        return {
            ahead: dict(zip(names, map(float, np.mean(rows, axis=0)), strict=True))
            for ahead, rows in found.items()
        }


def shares_of(data: Features, row: int, batch: Tensor, like: Tensor) -> Tensor:
    """Applied weights of the tokens as shares of all experts [N, E]."""
    weights, ids = data.weights[row, batch].float(), data.ids[row, batch].long()
    return torch.zeros_like(like).scatter(1, ids, weights / weights.sum(1, keepdim=True))


def drafts_of(bench: Bench, recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, dict[int, Any]]]:
    """Low-rank drafts, trained for all distances together, and how they did."""
    drafts = Drafts(bench, recipe)
    card = {"before": drafts.judge()}
    every = torch.arange(bench.train.hidden.shape[1])
    train(drafts.learned, lambda batch: drafts.loss(bench.train, batch), every, recipe)
    card["after"] = drafts.judge()
    log.info("drafts: %s", card)
    tensors = {"sharpness": drafts.sharpness.detach()}
    for name, parts in (("down", drafts.down), ("up", drafts.up)):
        tensors |= {f"{name}.{hop}": part.detach() for hop, part in enumerate(parts)}
    return tensors, card
