"""SPICE's surrogates: for every expert the best linear map of low rank, B·A·x.

How they are made is not public. *Reconstruction*: reduced-rank regression (with a ridge), in closed
form, of what the frozen expert computes of the tokens that are routed to it, each token by its
squared gate weight, since that is its share of the layer's output.

Letters: L MoE layers, N tokens, n tokens of one expert, h hidden size, E experts, r rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from predictor_bench import Bench, Recipe
from predictor_features import Features
from torch import Tensor

from oled.running.modules import MoeLayer

log = logging.getLogger("train_predictors")


def low_rank(
    x: Tensor, y: Tensor, weight: Tensor, rank: int, ridge: float
) -> tuple[Tensor, Tensor]:
    """A [r, h] and B [h, r] that make weight² · |y - B·A·x|² least; x, y [n, h], weight [n] > 0.

    `ridge`: how many tokens the wish for small numbers counts as much as. All outputs are first
    fitted by a full matrix; of its predictions the r strongest directions are kept, which is the
    optimum under that rank.
    """
    scaled = weight[:, None] * x
    gram = scaled.T @ scaled
    gram += ridge / len(x) * gram.diagonal().mean() * torch.eye(len(gram))
    root = torch.linalg.cholesky(gram)  # gram = root · rootᵀ
    full = torch.cholesky_solve(scaled.T @ (weight[:, None] * y), root)  # [h, h], y ~ x · full
    directions = torch.linalg.svd(root.T @ full, full_matrices=False).Vh[:rank]  # [r, h]
    return directions @ full.T, directions.T.contiguous()


def outputs(entry: MoeLayer, expert: int, x: Tensor) -> Tensor:
    """What an expert makes of x [n, h], not weighted."""
    ids = torch.full((len(x), 1), expert)
    made: Tensor = entry.modules[0].plain_forward()(entry.experts, x, ids, torch.ones(len(x), 1))
    return made


def tokens_of(data: Features, row: int, expert: int) -> tuple[Tensor, Tensor]:
    """Gate inputs [n, h] of the tokens routed to an expert, and their weights [n]."""
    token, slot = torch.where(data.ids[row] == expert)
    return data.hidden[row, token].float(), data.weights[row, token, slot].float()


@torch.no_grad()
def surrogates_of(
    layers: Sequence[MoeLayer], bench: Bench, recipe: Recipe
) -> tuple[dict[str, Tensor], list[float]]:
    """Surrogates of all experts, and by row the held-out share of the experts' squared (weighted)
    output that they miss: 1 is as good as nothing.

    An expert with fewer tokens than the rank has none (zeros).
    """
    tensors: dict[str, Tensor] = {}
    missed = []
    for row, entry in enumerate(layers):
        hidden, rank = bench.train.hidden.shape[2], recipe.surrogate_rank
        down = torch.zeros(entry.num_experts, rank, hidden)
        up = torch.zeros(entry.num_experts, hidden, rank)
        left = whole = 0.0
        for expert in range(entry.num_experts):
            x, weight = tokens_of(bench.train, row, expert)
            if len(x) >= rank:
                y = outputs(entry, expert, x)
                down[expert], up[expert] = low_rank(x, y, weight, rank, recipe.ridge)
            x, weight = tokens_of(bench.test, row, expert)
            y = outputs(entry, expert, x)
            error = y - x @ down[expert].T @ up[expert].T
            left += float((weight[:, None] * error).square().sum())
            whole += float((weight[:, None] * y).square().sum())
        tensors[f"surrogate_down.{row}"], tensors[f"surrogate_up.{row}"] = down, up
        missed.append(left / whole)
        log.info("surrogates of row %d miss %.3f of the output", row, missed[-1])
    return tensors, missed
