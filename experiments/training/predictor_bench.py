"""What predictors are trained and judged on.

Letters: L MoE layers, N tokens, h hidden size, E experts, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from predictor_features import Features
from torch import Tensor, nn
from torch.nn import functional

from oled.record import BlockDiffusion, Mode
from oled.running.families import Scoring
from oled.running.scores import router_scores


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the heads, besides the model."""

    prompts: int = 64  # of the training split
    held_out: int = 8  # of the test split
    skip: int = 34  # test problems that traces and cards use
    new_tokens: int = 96
    block_length: int = 16
    epochs: int = 8
    batch: int = 1024  # tokens
    rate: float = 3e-3  # of Adam; falls to zero like a cosine
    rank: int = 16  # of the drafts
    sharpness: float = 10.0  # at first
    alignment: float = 1.0  # weight of the drafted gate input's distance
    surrogate_rank: int = 4
    ridge: float = 128.0  # of the surrogates' regression, in tokens
    seed: int = 0

    @property
    def decode(self) -> BlockDiffusion:
        return BlockDiffusion(
            block_length=self.block_length,
            mode=Mode.FORCED,
            tokens_per_forward=2,
            max_new_tokens=self.new_tokens,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """What heads are trained and judged on; `routers` are frozen."""

    routers: list[nn.Module]
    scoring: Scoring
    train: Features
    test: Features

    @property
    def layers(self) -> range:
        return range(len(self.routers))

    def scores(self, row: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [N, E] as the router of `row` makes them, and what it would select by."""
        values, biased = router_scores(self.scoring, self.routers[row], logits)
        return values, values if biased is None else biased

    def targets(self, data: Features, row: int, places: Tensor) -> Tensor:
        """What a head learns of the tokens at these places [N, E]: a softmax router's shares of
        all experts, or which experts a sigmoid router selects."""
        if self.scoring is Scoring.SIGMOID:
            chosen = data.ids[row, places].long()
            return torch.zeros(len(places), len(self.weight(row))).scatter(1, chosen, 1.0)
        with torch.no_grad():
            hidden = data.hidden[row, places].float()
            return functional.linear(hidden, self.weight(row)).softmax(-1)

    def first_bias(self, row: int, chosen: int) -> Tensor:
        """Where a head's bias [E] begins: at the share of experts that are selected."""
        experts = len(self.weight(row))
        odds = chosen / (experts - chosen) if self.scoring is Scoring.SIGMOID else 1.0
        return torch.full((experts,), float(np.log(odds)))

    def weight(self, row: int) -> Tensor:
        return self.routers[row].get_parameter("weight").detach().float()


def train(
    parameters: Iterable[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    places: Tensor,
    recipe: Recipe,
) -> None:
    """Adam over all `places`, in batches of a new order each epoch."""
    torch.manual_seed(recipe.seed)
    optimizer = torch.optim.Adam(list(parameters), lr=recipe.rate)
    steps = recipe.epochs * -(-len(places) // recipe.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(recipe.epochs):
        for batch in torch.randperm(len(places)).split(recipe.batch):
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
            schedule.step()


def recall(chosen: Tensor, truth: Tensor) -> float:
    """Share of the true ids [N, k] that are among the chosen [N, k]."""
    return float((truth[:, :, None] == chosen[:, None, :]).any(-1).float().mean())
