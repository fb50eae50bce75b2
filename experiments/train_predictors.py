"""Train predictors of routing on a frozen model: temporal and spatial router heads, SPICE's drafts.

    python experiments/train_predictors.py --data ../shared/data/prompts/gsm8k --out .work/heads
    cp .work/heads/heads.safetensors oled/models/tiny/

A few minutes on one core. What the model routed is kept in OUT and read again if the command is
repeated; the heads themselves are trained in one go. `oled record heads=FILE` asks them.

- *Temporal*: a linear head for each MoE layer, which begins as the router, on the layer's gate
  input; learns how the same token is routed in the next forward.
- *Spatial*: the same on the gate input of the MoE layer before (for the first one: of the last one,
  a forward earlier); learns how the layer routes.
- *Drafts*: z + B·A·z carries the gate input from layer to layer, and the frozen routers read it;
  learns, for all distances together, the shares that the routers apply, and the gate input.

Letters: L MoE layers, N tokens, h hidden size, E experts, k top-k, r rank.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from predictor_features import Features, collect, routers_of
from torch import Tensor, nn
from torch.nn import functional

from oled.record import BlockDiffusion, LoadedModel, Mode, load_model, load_prompts
from oled.record.families import Scoring, read_family
from oled.record.predictors import draft, fingerprint, selection, write_heads
from oled.record.scores import router_scores

log = logging.getLogger("train_predictors")

Tensors = dict[str, Tensor]


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


def score_loss(scoring: Scoring, logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with the target [N, E]: of one choice for a softmax router, of E independent
    ones for a sigmoid router; nats a token."""
    if scoring is Scoring.SIGMOID:
        loss = functional.binary_cross_entropy_with_logits(logits, target, reduction="sum")
        return loss / len(logits)
    return functional.cross_entropy(logits, target)


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


Pairs = Callable[[Features], tuple[int, Tensor, Tensor]]
"""The row that a head listens to, where it listens, and where what it predicts is."""


def train_head(
    bench: Bench, row: int, pairs: Pairs, recipe: Recipe
) -> tuple[tuple[Tensor, Tensor], dict[str, float]]:
    """A head (weight [E, h], bias [E]) that predicts row `row`, and how it did."""
    data = bench.train
    source, here, there = pairs(data)
    inputs, targets = data.hidden[source, here].float(), bench.targets(data, row, there)
    head = (bench.weight(row).clone(), bench.first_bias(row, data.ids.shape[2]))
    for tensor in head:
        tensor.requires_grad_()

    def loss_of(batch: Tensor) -> Tensor:
        logits = functional.linear(inputs[batch], *head)
        return score_loss(bench.scoring, logits, targets[batch])

    train(head, loss_of, here, recipe)
    return (head[0].detach(), head[1].detach()), judge_head(bench, row, pairs, head)


@torch.no_grad()
def judge_head(
    bench: Bench, row: int, pairs: Pairs, head: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Held-out loss, and recall of the experts routed; `router`: by the frozen router of the row,
    asked about the same gate input."""
    data = bench.test
    source, here, there = pairs(data)
    inputs, truth = data.hidden[source, here].float(), data.ids[row, there]
    logits = functional.linear(inputs, *head)
    asked = bench.scores(row, functional.linear(inputs, bench.weight(row)))[1]
    loss = score_loss(bench.scoring, logits, bench.targets(data, row, there))
    best = (scores.topk(truth.shape[1], dim=-1).indices.short() for scores in (logits, asked))
    ours, routers = (recall(ids, truth) for ids in best)
    return {"loss": loss.item(), "recall": ours, "recall_of_the_router": routers}


def heads_of(bench: Bench, recipe: Recipe) -> tuple[Tensors, dict[str, list[dict[str, float]]]]:
    """Temporal and spatial heads of all rows, and how they did on held-out prompts."""
    tensors: Tensors = {}
    card: dict[str, list[dict[str, float]]] = {"temporal": [], "spatial": []}
    for row in bench.layers:

        def next_forward(data: Features, row: int = row) -> tuple[int, Tensor, Tensor]:
            return (row, *data.followed)

        def row_before(data: Features, row: int = row) -> tuple[int, Tensor, Tensor]:
            if row == 0:
                return (len(bench.routers) - 1, *data.followed)
            every = torch.arange(data.hidden.shape[1])
            return row - 1, every, every

        for kind, pairs in (("temporal", next_forward), ("spatial", row_before)):
            head, found = train_head(bench, row, pairs, recipe)
            tensors[f"{kind}.{row}"], tensors[f"{kind}_bias.{row}"] = head
            card[kind].append(found)
            log.info("%s head of row %d: %s", kind, row, found)
    return tensors, card


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


def drafts_of(bench: Bench, recipe: Recipe) -> tuple[Tensors, dict[str, dict[int, Any]]]:
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


def kept_features(
    out: Path, name: str, key: Mapping[str, object], make: Callable[[], Features]
) -> Features:
    """What was collected before for the same model and settings, else collected now."""
    file = out / f"{name}.pt"
    if file.exists():
        kept = torch.load(file, weights_only=True)
        if kept.pop("key") == key:
            return Features(**kept)
    features = make()
    draft = file.with_suffix(".new")
    torch.save({"key": key, **{n: getattr(features, n) for n in Features.__slots__}}, draft)
    draft.replace(file)
    return features


def bench_of(loaded: LoadedModel, data: Path, out: Path, recipe: Recipe) -> Bench:
    """Decode training and held-out prompts with a model."""
    routers = routers_of(loaded.model)
    scoring = read_family(loaded.model.config).scoring
    parts = {
        "train": load_prompts(data / "train.jsonl", limit=recipe.prompts),
        "test": load_prompts(data / "test.jsonl", skip=recipe.skip, limit=recipe.held_out),
    }
    features = {}
    for name, prompts in parts.items():
        key = {
            "routers": fingerprint(routers),
            "decode": repr(recipe.decode),
            "prompts": [prompt.sha256 for prompt in prompts],
        }
        features[name] = kept_features(
            out, name, key, lambda p=prompts: collect(loaded, p, recipe.decode)
        )
    return Bench(routers, scoring, features["train"], features["test"])


def train_predictors(loaded: LoadedModel, data: Path, out: Path, recipe: Recipe) -> Path:
    """Collect, train, and write OUT/heads.safetensors with its card."""
    out.mkdir(parents=True, exist_ok=True)
    bench = bench_of(loaded, data, out, recipe)
    heads, judged = heads_of(bench, recipe)
    drafts, drafted = drafts_of(bench, recipe)
    card = {
        "routers": fingerprint(bench.routers),
        "model": loaded.name,
        "recipe": asdict(recipe),
        "tokens": {"train": bench.train.hidden.shape[1], "test": bench.test.hidden.shape[1]},
        "held_out": {**judged, "drafts": drafted},
    }
    file = out / "heads.safetensors"
    write_heads(file, heads | drafts, card)
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="what was collected, and the heads")
    parser.add_argument("--model", default="tiny", help="the bundled model, or a folder")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    loaded = load_model(args.model, "cpu")
    log.info("%s", train_predictors(loaded, args.data, args.out, Recipe()))


if __name__ == "__main__":
    main()
