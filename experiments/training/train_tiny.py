"""Train the bundled model: a small LLaDA2 by block diffusion, on a CPU.

    python experiments/training/train_tiny.py --data GSM8K --out .work/first \\
        --recipe first --steps 2228
    python experiments/training/train_tiny.py --data GSM8K --out .work/tiny \\
        --start .work/first/checkpoint.pt --steps 1700 --processes 2 --rank 0  # and --rank 1

With `--processes P` start it P times, with `--rank` 0 to P - 1: processes of one thread, each with
its windows of every step, add up their gradients.

Run the same command again to go on from the last checkpoint. The learning rate is flat for the
first part of the budget and falls to zero in the rest; `flat.pt` is the state where it begins to
fall. To train longer than planned, put it in the place of `checkpoint.pt` and give more steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tiny_attention
import tiny_data
import tiny_experts
import tiny_text
import torch
import torch.distributed as dist
from tiny_data import Corpus, Mixture
from tiny_objective import Routes, autoregressive_loss, diffusion_loss, held_out, held_out_next
from tiny_optimizer import optimizers
from tiny_recipe import RECIPES, Recipe, initial_model
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from oled.atomic import replaced_file

log = logging.getLogger("train_tiny")


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train, on how many processes, and how often to look and to save."""

    steps: int
    rank: int = 0
    processes: int = 1
    evaluate_every: int = 100
    checkpoint_every: int = 100
    narrow: bool = False  # bf16 under autocast: fast where the CPU has AVX-512 BF16, slow elsewhere


class Trainer:
    """A run in a folder: its model, optimizers and place in the budget."""

    def __init__(
        self,
        out: Path,
        recipe: Recipe,
        budget: Budget,
        text: Mixture,
        test: Corpus,
        start: Path | None = None,
    ) -> None:
        """`start` is another run's checkpoint, whose weights this one begins with."""
        self.out, self.recipe, self.budget, self.text, self.test = out, recipe, budget, text, test
        self.model = initial_model(recipe)
        self.model.set_experts_implementation(tiny_experts.NAME)
        self.model.set_attn_implementation(tiny_attention.NAME)
        self.routes = Routes(self.model)
        self.optimizers = optimizers(self.model, recipe)
        self.step, self.spent_s = 0, 0.0
        if self.checkpoint.exists():
            self.resume()
        else:
            self.begin(start)

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def begin(self, start: Path | None) -> None:
        """Weights of another run, if told; the mask's embedding as the recipe wants it."""
        if start is not None:
            self.model.load_state_dict(torch.load(start, weights_only=True)["model"])
        if self.recipe.mask_mean:
            embeddings = self.model.model.word_embeddings.weight.data
            embeddings[self.model.config.mask_token_id] = embeddings.mean(0)

    def resume(self) -> None:
        """Go on where the last checkpoint stopped."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.spent_s = state["step"], state["spent_s"]
        log.info("resumed at step %d, %.1f minutes spent", self.step, self.spent_s / 60)

    def save(self) -> None:
        """Write the checkpoint under another name first: a crash leaves the old one whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "spent_s": self.spent_s,
        }
        with replaced_file(self.checkpoint) as draft:
            torch.save(state, draft)

    def loss(self, progress: float) -> tuple[Tensor, Tensor | None]:
        """Loss of this step's windows, and which of the tokens that the routers saw are masked."""
        recipe = self.recipe
        place = self.step * self.budget.processes + self.budget.rank
        items = np.arange(place * recipe.windows, (place + 1) * recipe.windows)
        clean = self.text.windows(items, recipe.length, recipe.seed)
        if progress < recipe.autoregressive_until:
            return autoregressive_loss(self.model, clean), None
        blocks = recipe.first_blocks if progress < recipe.first_until else recipe.blocks
        block = blocks[self.step % len(blocks)]
        rng = np.random.default_rng((recipe.seed, place))
        noise = tiny_data.stratified_noise(*clean.shape, block, rng)[None]
        if recipe.complement:
            noise = torch.cat((noise, ~noise))
        loss = diffusion_loss(self.model, clean, noise, block, recipe.sharpening)
        noise = noise.transpose(0, 1)
        if recipe.alignment:
            loss = loss + recipe.alignment * self.routes.alignment(noise)
        masked = torch.cat((noise, torch.zeros_like(noise[:, :1])), dim=1)
        return loss, masked.flatten()

    def update(self) -> dict[str, float]:
        """One step; returns the numbers of the step."""
        recipe = self.recipe
        progress = self.step / self.budget.steps
        rate = min(1.0, (1 - progress) / (1 - recipe.flat_until))
        warmup = min(1.0, (self.step + 1) / recipe.warmup_steps)
        self.routes.seen.clear()
        narrow = self.budget.narrow  # routers, head and losses stay in fp32
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss, masked = self.loss(progress)
        loss.backward()
        embeddings = self.model.model.word_embeddings.weight
        if recipe.mask_frozen:
            embeddings.grad[self.model.config.mask_token_id] = 0
        self.sum_up([p.grad for p in self.model.parameters()], 1 / self.budget.processes)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate * warmup
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        load = self.routes.load(masked, recipe.balance_masked)
        self.sum_up([load])
        load = self.balance(load, rate)
        self.step += 1
        numbers = {"rate": rate * warmup, "train": loss.item(), "gradient_norm": norm.item()}
        return {**numbers, **load}

    def sum_up(self, tensors: list[Tensor], scale: float = 1.0) -> None:
        """Add up what the processes have, in place, times `scale`."""
        if self.budget.processes == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat *= scale
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def balance(self, load: Tensor, rate: float) -> dict[str, float]:
        """Without a loss: the selection bias of busy experts sinks a little, of idle ones rises.

        load: [layers, E]. Returns the least load entropy / ln E, and idle experts.
        """
        size, slack = self.recipe.balance_step * rate, self.recipe.balance_slack
        mean = load.mean(1, keepdim=True)
        moves = (mean - load) / mean
        moves = torch.where(moves.abs() <= slack, 0, moves - slack * moves.sign())
        for router, move in zip(self.routes.routers, moves, strict=True):
            router.expert_bias.add_(size * move.clamp(-1, 1))
        share = load / load.sum(1, keepdim=True)
        entropy = -(share * share.clamp_min(1e-12).log()).sum(1) / math.log(share.shape[1])
        return {"load_entropy": entropy.min().item(), "idle": int((load == 0).sum())}

    def run(self) -> None:
        """Train until the budget is spent; evaluate and save on the way."""
        flat = int(self.recipe.flat_until * self.budget.steps)
        previous = time.monotonic()
        while self.step < self.budget.steps:
            numbers = self.update()
            now = time.monotonic()
            self.spent_s, previous = self.spent_s + now - previous, now
            last = self.step == self.budget.steps
            if self.budget.rank:
                continue
            if self.step % self.budget.evaluate_every == 0 or self.step == 1 or last:
                self.record(numbers)
                previous = time.monotonic()
            if self.step % self.budget.checkpoint_every == 0 or self.step == flat or last:
                self.save()
            if self.step == flat:
                shutil.copy(self.checkpoint, self.out / "flat.pt")

    def record(self, numbers: dict[str, float]) -> None:
        """Append one line to the training log."""
        self.model.eval()
        windows = self.recipe.held_out_windows
        if self.recipe.autoregressive_until == 1:
            losses = held_out_next(self.model, self.test, self.recipe, windows)
        else:
            losses = held_out(self.model, self.test, self.recipe, windows=windows)
        self.model.train()
        seen = self.step * self.budget.processes * self.recipe.windows
        tokens = seen * self.recipe.length
        line = {"step": self.step, "minutes": self.spent_s / 60, "tokens": tokens}
        line = {k: round(v, 5) for k, v in {**line, **numbers, **losses}.items()}
        with (self.out / "train_log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        log.info("%s", line)


def read_text(
    recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerFast, kept: Path
) -> Mixture:
    """The sources of a recipe, tokenized; kept in the folder `kept`, since it takes a while."""
    corpora = {}
    for name in set(recipe.text):
        file = kept / f"{name}.npz"
        if not file.exists():
            longest = None if name == "gsm8k" else recipe.length
            corpus = Corpus.encode(tiny_text.SOURCES[name].read(data), tokenizer, longest)
            np.savez(file, stream=corpus.stream, starts=corpus.starts)
        with np.load(file) as arrays:
            corpora[name] = Corpus(arrays["stream"], arrays["starts"])
    return Mixture(tuple(corpora[name] for name in recipe.text))


def prepare(data: Path, kept: Path, recipe: Recipe) -> tuple[Mixture, Corpus]:
    """Training text and held-out text; the tokenizer is made of GSM8K once, and kept."""
    kept.mkdir(parents=True, exist_ok=True)
    if not (kept / "tokenizer").exists():
        documents = tiny_data.load_documents(data / "train.jsonl")
        tiny_data.train_tokenizer(documents, recipe.vocab_size).save_pretrained(kept / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(kept / "tokenizer")
    test = Corpus.encode(tiny_data.load_documents(data / "test.jsonl"), tokenizer)
    return read_text(recipe, data, tokenizer, kept), test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints and log")
    parser.add_argument("--start", type=Path, help="another run's checkpoint, to begin with")
    parser.add_argument("--steps", type=int, required=True, help="the whole budget")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--narrow", action="store_true", help="bf16 (fast with AVX-512 BF16)")
    parser.add_argument("--recipe", choices=RECIPES, default="bundled", help="see tiny_recipe.py")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    recipe = RECIPES[args.recipe]
    budget = Budget(args.steps, args.rank, args.processes, narrow=args.narrow)
    if budget.processes > 1:
        store = f"file://{(args.out / 'rendezvous').resolve()}"
        dist.init_process_group(
            "gloo", init_method=store, rank=budget.rank, world_size=budget.processes
        )
    text, test = prepare(args.data, args.out, recipe)
    settings = {"recipe": asdict(recipe), "budget": asdict(budget)}
    if not args.rank:
        (args.out / "recipe.json").write_text(json.dumps(settings, indent=2) + "\n")
    Trainer(args.out, recipe, budget, text, test, args.start).run()


if __name__ == "__main__":
    main()
