"""Train predictors of routing on a frozen model: temporal and spatial router heads, SPICE's drafts;
and SPICE's surrogates of its experts.

    python experiments/training/train_predictors.py --data GSM8K --out .work/heads
    cp .work/heads/heads.safetensors oled/models/tiny/

A few minutes on one core. What the model routed is kept in OUT and read again if the command is
repeated; the heads themselves are trained in one go. `oled record heads=FILE` asks them.

- *Temporal*: a linear head for each MoE layer, which begins as the router, on the layer's gate
  input; learns how the same token is routed in the next forward.
- *Spatial*: the same on the gate input of the MoE layer before (for the first one: of the last one,
  a forward earlier); learns how the layer routes.
- *Drafts*: z + B·A·z carries the gate input from layer to layer, and the frozen routers read it;
  learns, for all distances together, the shares that the routers apply, and the gate input.
- *Surrogates*: B·A·x in the place of an expert; see `predictor_surrogates.py`.

Letters: L MoE layers, N tokens, h hidden size, E experts, k top-k, r rank.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from predictor_bench import Bench, Recipe, recall, train
from predictor_drafts import drafts_of
from predictor_features import Features, collect, routers_of
from predictor_surrogates import surrogates_of
from torch import Tensor
from torch.nn import functional

from oled.atomic import replaced_file
from oled.record import LoadedModel, load_model, load_prompts
from oled.running.families import Scoring, read_family
from oled.running.modules import experts_of, moe_layers
from oled.running.predictors import fingerprint, write_heads

log = logging.getLogger("train_predictors")

Tensors = dict[str, Tensor]


def score_loss(scoring: Scoring, logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with the target [N, E]: of one choice for a softmax router, of E independent
    ones for a sigmoid router; nats a token."""
    if scoring is Scoring.SIGMOID:
        loss = functional.binary_cross_entropy_with_logits(logits, target, reduction="sum")
        return loss / len(logits)
    return functional.cross_entropy(logits, target)


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
    with replaced_file(file) as draft:
        torch.save({"key": key, **{n: getattr(features, n) for n in Features.__slots__}}, draft)
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
    layers = moe_layers(loaded.model)
    surrogates, missed = surrogates_of(layers, bench, recipe)
    card = {
        "routers": fingerprint(bench.routers),
        "experts": fingerprint(experts_of(layers)),
        "model": loaded.name,
        "recipe": asdict(recipe),
        "tokens": {"train": bench.train.hidden.shape[1], "test": bench.test.hidden.shape[1]},
        "held_out": {**judged, "drafts": drafted, "surrogates_miss": missed},
    }
    file = out / "heads.safetensors"
    write_heads(file, heads | drafts | surrogates, card)
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
