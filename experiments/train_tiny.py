"""Train the bundled model: LLaDA2 with 128 small experts a layer, block diffusion, GSM8K, 2 cores.

    python experiments/train_tiny.py --data ../shared/data/prompts/gsm8k --out .work/tiny

Two one-thread processes share each step and add up their gradients. Run the same command again to
go on from the last checkpoint. The schedule follows the clock; with `--steps N` it follows the
step number instead, and the run is reproducible.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tiny_data
import tiny_experts
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_data import Corpus
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from oled.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM, LLaDA2TopKRouter

log = logging.getLogger("train_tiny")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what the run learns, besides data and time."""

    vocab_size: int = 1024
    length: int = 256  # clean positions of a window
    windows: int = 6  # of each process
    blocks: tuple[int, ...] = (16, 32)  # alternate, so that one model serves both
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    clip: float = 1.0
    warmup_steps: int = 50
    flat_until: float = 0.4  # of the budget; then linear to zero
    balance_step: float = 0.01  # falls with the learning rate, but has no warm-up
    seed: int = 1234
    held_out_windows: int = 48


def tiny_config(recipe: Recipe) -> LLaDA2MoeConfig:
    """The bundled model's shape: 1 dense and 4 MoE layers, E 128, k 4, expert width 32."""
    return LLaDA2MoeConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.06,  # with 0.02 the first few hundred steps leave most experts idle
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        num_experts=128,
        num_experts_per_tok=4,
        block_length=16,
        mask_token_id=1,
        pad_token_id=0,
        eos_token_id=0,
    )


def initial_model(recipe: Recipe) -> LLaDA2MoeModelLM:
    """The untrained model, the control of every locality figure."""
    torch.manual_seed(recipe.seed)
    return LLaDA2MoeModelLM(tiny_config(recipe))


def diffusion_loss(model: LLaDA2MoeModelLM, clean: Tensor, noise: Tensor, block: int) -> Tensor:
    """Any-order bound in nats a token: cross-entropy averaged over the masked positions of each
    block, then over blocks. clean, noise: [W, S]."""
    ids, positions = tiny_data.double(clean, noise, model.config.mask_token_id)
    visible = tiny_data.doubled_mask(clean.shape[1], block)
    hidden = model.model(ids, attention_mask=visible, position_ids=positions).last_hidden_state
    logits = model.lm_head(hidden[:, : clean.shape[1]][noise])
    losses = torch.nn.functional.cross_entropy(logits, clean[noise], reduction="none")
    per_block = noise.view(-1, block).sum(1).repeat_interleave(block)[noise.flatten()]
    return (losses / per_block).sum() / (noise.numel() // block)


@torch.no_grad()
def held_out(model: LLaDA2MoeModelLM, corpus: Corpus, recipe: Recipe) -> dict[str, float]:
    """Loss on the first held-out windows with always the same noise, by block length."""
    clean = corpus.windows(
        np.arange(recipe.held_out_windows), recipe.length, recipe.seed, shuffle=False
    )
    losses = {}
    for block in recipe.blocks:
        rng = np.random.default_rng((recipe.seed, block))
        noise = tiny_data.stratified_noise(*clean.shape, block, rng)
        chunks = zip(clean.split(recipe.windows), noise.split(recipe.windows), strict=True)
        parts = [diffusion_loss(model, c, n, block).item() for c, n in chunks]
        losses[f"held_out_b{block}"] = sum(parts) / len(parts)
    return losses


class Balance:
    """Loss-free load balance: after a step the selection bias of busy experts sinks a little."""

    def __init__(self, model: LLaDA2MoeModelLM) -> None:
        self.routers = [m for m in model.modules() if isinstance(m, LLaDA2TopKRouter)]
        self.load = torch.zeros(len(self.routers), model.config.num_experts)
        for row, router in zip(self.load, self.routers, strict=True):
            router.register_forward_hook(self._counter(row))

    @staticmethod
    def _counter(row: Tensor) -> Callable[..., None]:
        def count(_module: object, _inputs: object, output: tuple[Tensor, ...]) -> None:
            row.add_(output[2].flatten().bincount(minlength=len(row)))

        return count

    def step(self, size: float) -> dict[str, float]:
        """Move the biases by at most `size`; returns load entropy / ln E and idle experts."""
        dist.all_reduce(self.load)
        mean = self.load.mean(1, keepdim=True)
        for router, move in zip(self.routers, (mean - self.load) / mean, strict=True):
            router.expert_bias.add_(size * move.clamp(-1, 1))
        share = self.load / self.load.sum(1, keepdim=True)
        entropy = -(share * share.clamp_min(1e-12).log()).sum(1) / math.log(share.shape[1])
        stats = {"load_entropy": entropy.min().item(), "idle": int((self.load == 0).sum())}
        self.load.zero_()
        return stats


class Trainer:
    """One of the processes: its model, its share of each batch, its part of the log."""

    def __init__(self, args: argparse.Namespace, recipe: Recipe, rank: int) -> None:
        self.args, self.recipe, self.rank = args, recipe, rank
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "tokenizer")
        read = tiny_data.load_documents
        self.train = Corpus.encode(read(args.data / "train.jsonl"), tokenizer)
        self.test = Corpus.encode(read(args.data / "test.jsonl"), tokenizer)
        self.model = initial_model(recipe)
        self.model.set_experts_implementation(tiny_experts.NAME)
        self.balance = Balance(self.model)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.gradient = torch.zeros(sum(p.numel() for p in matrices + vectors))
        sizes = [p.numel() for p in matrices + vectors]
        for p, part in zip(matrices + vectors, self.gradient.split(sizes), strict=True):
            p.grad = part.view_as(p)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            fused=True,
        )
        self.step, self.spent_s = 0, 0.0
        if self.checkpoint.exists():
            self.resume()

    @property
    def checkpoint(self) -> Path:
        return self.args.out / "checkpoint.pt"

    def resume(self) -> None:
        """Go on where the last checkpoint stopped."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.spent_s = state["step"], state["spent_s"]
        log.info("resumed at step %d, %.1f minutes spent", self.step, self.spent_s / 60)

    def save(self) -> None:
        """Write the checkpoint under another name first: a crash leaves the old one whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "spent_s": self.spent_s,
        }
        draft = self.checkpoint.with_suffix(".new")
        torch.save(state, draft)
        draft.replace(self.checkpoint)

    def progress(self) -> float:
        """Part of the budget used, the same number in every process."""
        spent, budget = self.spent_s, self.args.minutes * 60
        if self.args.steps:
            spent, budget = self.step, self.args.steps
        value = torch.tensor(spent / budget, dtype=torch.float64)
        dist.broadcast(value, 0)
        return value.item()

    def update(self, progress: float) -> dict[str, float]:
        """One step on this process's windows; returns the numbers of the step."""
        recipe, world = self.recipe, dist.get_world_size()
        first = (self.step * world + self.rank) * recipe.windows
        items = np.arange(first, first + recipe.windows)
        clean = self.train.windows(items, recipe.length, recipe.seed)
        block = recipe.blocks[self.step % len(recipe.blocks)]
        rng = np.random.default_rng((recipe.seed, first))
        noise = tiny_data.stratified_noise(*clean.shape, block, rng)
        rate = min(1.0, (1 - progress) / (1 - recipe.flat_until))
        warmup = min(1.0, (self.step + 1) / recipe.warmup_steps)
        self.gradient.zero_()
        loss = diffusion_loss(self.model, clean, noise, block)
        loss.backward()
        dist.all_reduce(self.gradient)
        self.gradient /= world
        norm = self.gradient.norm()
        self.gradient *= min(1.0, recipe.clip / (norm.item() + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate * warmup
        self.optimizer.step()
        load = self.balance.step(recipe.balance_step * rate)
        self.step += 1
        numbers = {"rate": rate * warmup, "train": loss.item(), "gradient_norm": norm.item()}
        return {**numbers, **load}

    def run(self) -> None:
        """Train until the budget is spent; evaluate and save on the way."""
        previous, saved_s = time.monotonic(), self.spent_s
        while (progress := self.progress()) < 1:
            numbers = self.update(progress)
            due = self.step % self.args.evaluate_every == 0 or self.step == 1
            if due and self.rank == 0:
                self.record(numbers)
            now = time.monotonic()
            self.spent_s, previous = self.spent_s + now - previous, now
            if self.rank == 0 and self.spent_s - saved_s > 60 * self.args.checkpoint_minutes:
                self.save()
                saved_s = self.spent_s
        if self.rank == 0:
            self.record(numbers)
            self.save()

    def record(self, numbers: dict[str, float]) -> None:
        """Append one line to the training log."""
        self.model.eval()
        losses = held_out(self.model, self.test, self.recipe)
        self.balance.load.zero_()
        self.model.train()
        tokens = self.step * dist.get_world_size() * self.recipe.windows * self.recipe.length
        line = {"step": self.step, "minutes": self.spent_s / 60, "tokens": tokens}
        line = {k: round(v, 5) for k, v in {**line, **numbers, **losses}.items()}
        with (self.args.out / "train_log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        log.info("%s", line)


def work(rank: int, args: argparse.Namespace, recipe: Recipe) -> None:
    """Body of one process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    store = f"file://{(args.out / 'rendezvous').resolve()}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.processes)
    Trainer(args, recipe, rank).run()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints and log")
    parser.add_argument("--minutes", type=float, default=55.0, help="training time")
    parser.add_argument("--steps", type=int, help="follow steps, not the clock")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=150, help="steps")
    parser.add_argument("--checkpoint-minutes", type=float, default=4.0)
    return parser.parse_args()


def main() -> None:
    args, recipe = parse(), Recipe()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rendezvous").unlink(missing_ok=True)
    if not (args.out / "tokenizer").exists():
        documents = tiny_data.load_documents(args.data / "train.jsonl")
        tokenizer = tiny_data.train_tokenizer(documents, recipe.vocab_size)
        tokenizer.save_pretrained(args.out / "tokenizer")
    settings = {"recipe": asdict(recipe), "processes": args.processes, "minutes": args.minutes}
    (args.out / "recipe.json").write_text(json.dumps(settings, indent=2) + "\n")
    mp.spawn(work, (args, recipe), nprocs=args.processes)


if __name__ == "__main__":
    main()
