"""Cache-aware post-training of the small model: router and temporal heads learn together.

    python experiments/training/posttrain_router.py --data GSM8K --out .work/post

Source: arXiv 2609.04895. The loss is the language model's plus `weight` times the router mass of
the next forward that falls outside a soft membership sigmoid((priority - kth) / temperature) of the
cache, where the priority is the router's score plus the temporal head's and kth the lowest that
`slots` experts have. *Ours*: the next forward is the same window with two more positions of each
block opened; priorities and mass are means over a block, as one forward has them; the mass is the
applied gate weight; heads begin as the router. Two runs from the bundled weights, with the loss and
without (`weight` 0), each followed by its held-out loss, a recording of the problems of `demo` with
its heads, and its traffic under LRU and `temporal_router`: OUT/report.json, loss beside traffic.

Letters: W windows, S positions, N blocks of a window, E experts.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_attention
import tiny_data
import tiny_experts
import torch
from predictor_features import routers_of
from tiny_data import Corpus
from tiny_objective import diffusion_loss, held_out
from tiny_recipe import Recipe
from torch import Tensor, nn
from torch.nn import functional

from oled.models.llada2 import LLaDA2MoeModelLM
from oled.record import BlockDiffusion, LoadedModel, Mode, load_prompts, record
from oled.running.loading import load_model
from oled.running.predictors import fingerprint, write_heads
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace

log = logging.getLogger("posttrain_router")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of both runs; `weight` and `temperature` as published for Qwen3."""

    steps: int = 60
    windows: int = 4
    block: int = 16
    opened: int = 2  # positions of a block that the next forward has more
    slots: int = 20
    temperature: float = 0.03
    weight: float = 0.1
    rate: float = 3e-4  # AdamW; falls to zero linearly
    head_rate: float = 3e-3
    seed: int = 0
    problems: int = 9  # recorded
    new_tokens: int = 96


@contextmanager
def listening(routers: list[nn.Module]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Inside, (gate input, logits, weights, ids) of every router call, in order."""
    seen: list[tuple[Tensor, ...]] = []
    hooks = [
        router.register_forward_hook(lambda _m, i, output: seen.append((i[0], *output)))
        for router in routers
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def two_forwards(windows: int, length: int, settings: Settings, step: int) -> Tensor:
    """Masks [2, W, S] of a forward and the next, in which `opened` positions of a block fewer are
    masked."""
    rng = np.random.default_rng((settings.seed, step))
    first = tiny_data.stratified_noise(windows, length, settings.block, rng)
    order = torch.from_numpy(rng.random((windows, length))).masked_fill(~first, 2.0)
    blocks = order.unflatten(1, (-1, settings.block))
    opened = torch.zeros_like(blocks, dtype=torch.bool)
    opened.scatter_(2, blocks.topk(settings.opened, dim=2, largest=False).indices, True)
    return torch.stack((first, first & ~opened.flatten(1)))


def mass_outside(
    seen: list[tuple[Tensor, ...]], heads: nn.ParameterList, windows: int, settings: Settings
) -> Tensor:
    """Share of the next forward's gate weight on experts outside the soft membership, mean over
    blocks and layers."""

    def by_block(x: Tensor, copy: int) -> Tensor:  # tokens of [this | next | clean] -> [W, N, E]
        x = x.unflatten(0, (windows, 3, -1))[:, copy]
        return x.unflatten(1, (-1, settings.block)).mean(2)

    outside = []
    for (hidden, logits, weights, ids), head in zip(seen, heads, strict=True):
        priority = by_block(logits.sigmoid() + functional.linear(hidden, head).sigmoid(), 0)
        kth = priority.topk(settings.slots, dim=-1).values[..., -1:]
        member = ((priority - kth) / settings.temperature).sigmoid()
        applied = torch.zeros_like(logits).scatter(1, ids, weights)
        mass = by_block(applied / weights.sum(1, keepdim=True), 1)
        outside.append((mass * (1 - member)).sum(-1).mean())
    return torch.stack(outside).mean()


def post_train(
    model: LLaDA2MoeModelLM, text: Corpus, settings: Settings, weight: float
) -> nn.ParameterList:
    """Train all weights of `model` in place; returns the heads [E, h] of its rows."""
    routers = routers_of(model)
    heads = nn.ParameterList(router.get_parameter("weight").detach().clone() for router in routers)
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters()), "lr": settings.rate},
        {"params": list(heads), "lr": settings.head_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.steps)
    length = Recipe().length
    with listening(routers) as seen:
        for step in range(settings.steps):
            items = np.arange(step * settings.windows, (step + 1) * settings.windows)
            clean = text.windows(items, length, settings.seed)
            seen.clear()
            noise = two_forwards(len(clean), length, settings, step)
            loss = diffusion_loss(model, clean, noise, settings.block)
            outside = mass_outside(seen, heads, len(clean), settings)
            (loss + weight * outside).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            falls.step()
            if step % 10 == 0 or step + 1 == settings.steps:
                log.info("step %d: loss %.4f, outside %.4f", step, loss.item(), outside.item())
    return heads


def traffic(model: Any, heads: Path, prompts: Any, out: Path, settings: Settings) -> dict[str, Any]:
    """Hit rate and bytes a token of the model's own routes, by policy."""
    decode = BlockDiffusion(
        block_length=settings.block,
        mode=Mode.FORCED,
        tokens_per_forward=2,
        max_new_tokens=settings.new_tokens,
    )
    if not (out / "trace.json").exists():
        record(model, prompts, decode, out, heads=heads, score_width=8)
    subject = PreparedTrace.of(out)
    found = {}
    for policy in ("lru", "temporal_router"):
        result = simulate(
            subject, policy, slots=settings.slots, geometry="llada2_mini", references=False
        ).metrics
        keys = ("hit_rate", "decode_h2d_bytes_per_token", "tpot_ns")
        found[policy] = {key: result[key] for key in keys}
    return found


def run(name: str, data: Path, out: Path, settings: Settings, weight: float | None) -> dict:
    """One row of the report; `weight` None leaves the model as it is."""
    _, model, tokenizer, _ = load_model("tiny")
    tokenized = {
        part: Corpus.encode(tiny_data.load_documents(data / f"{part}.jsonl"), tokenizer)
        for part in ("train", "test")
    }
    model.set_experts_implementation(tiny_experts.NAME)
    model.set_attn_implementation(tiny_attention.NAME)
    heads = nn.ParameterList(r.get_parameter("weight").detach() for r in routers_of(model))
    if weight is not None:
        heads = post_train(model.train(), tokenized["train"], settings, weight)
    model.eval()
    row: dict[str, Any] = {"weight": weight, **held_out(model, tokenized["test"], Recipe())}
    plain = load_model("tiny").model
    plain.load_state_dict(model.state_dict())
    file = out / f"{name}.safetensors"
    tensors = {f"temporal.{row}": head.detach() for row, head in enumerate(heads)}
    tensors |= {f"temporal_bias.{r}": torch.zeros(len(head)) for r, head in enumerate(heads)}
    card = {"routers": fingerprint(routers_of(plain)), "settings": asdict(settings)}
    write_heads(file, tensors, {**card, "weight": weight})
    loaded = LoadedModel(name, plain, tokenizer, torch.float16)
    prompts = load_prompts(data / "test.jsonl", limit=settings.problems)
    row |= traffic(loaded, file, prompts, out / name, settings)
    log.info("%s: %s", name, row)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="heads, recordings and the report")
    parser.add_argument("--steps", type=int, default=Settings().steps)
    parser.add_argument("--weight", type=float, default=Settings().weight, help="of the cache loss")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(steps=args.steps, weight=args.weight)
    runs = {"as_bundled": None, "language_model": 0.0, "cache_aware": settings.weight}
    report = {
        name: run(name, args.data, args.out, settings, weight) for name, weight in runs.items()
    }
    text = json.dumps({"settings": asdict(settings), "runs": report}, indent=2)
    (args.out / "report.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
