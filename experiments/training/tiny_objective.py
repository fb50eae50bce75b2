"""Losses of the small model. Letters: W windows, S clean positions of a window, C copies."""

from __future__ import annotations

import numpy as np
import tiny_attention
import tiny_data
import torch
from tiny_data import Corpus
from tiny_recipe import Recipe
from torch import Tensor
from torch.nn.functional import cross_entropy

from oled.models.llada2 import LLaDA2MoeModelLM, LLaDA2TopKRouter


def diffusion_loss(
    model: LLaDA2MoeModelLM, clean: Tensor, noise: Tensor, block: int, sharpening: float = 0.0
) -> Tensor:
    """Any-order bound in nats a token: cross-entropy averaged over the masked positions of each
    block, then over blocks. clean: [W, S]; noise: [C, W, S], masks of the noisy copies.

    `sharpening` adds that much of the entropy of predictions that are right already.
    """
    if model.config._attn_implementation != tiny_attention.NAME:
        raise ValueError(f"the loss needs set_attn_implementation({tiny_attention.NAME!r})")
    copies, length = len(noise), clean.shape[1]
    noise = noise.transpose(0, 1)  # [W, C, S]
    ids, positions = tiny_data.copies(clean, noise, model.config.mask_token_id)
    hidden = model.model(
        ids, position_ids=positions, copies=copies + 1, block=block
    ).last_hidden_state[:, : copies * length]
    logits = head(model, hidden[noise.flatten(1)])
    truth = clean[:, None].expand(-1, copies, -1)[noise]
    losses = cross_entropy(logits, truth, reduction="none")
    if sharpening:
        logs = logits.log_softmax(-1)
        right = logits.argmax(-1) == truth
        losses = losses - sharpening * right * (logs.exp() * logs).sum(-1)
    per_block = noise.reshape(-1, block).sum(1).repeat_interleave(block)[noise.flatten()]
    return (losses / per_block).sum() / (per_block.reciprocal().sum())


def autoregressive_loss(model: LLaDA2MoeModelLM, clean: Tensor) -> Tensor:
    """Nats a token of next-token prediction under causal attention. clean: [W, S]."""
    hidden = model.model(clean).last_hidden_state[:, :-1]
    return cross_entropy(head(model, hidden).flatten(0, 1), clean[:, 1:].flatten())


@torch.autocast("cpu", enabled=False)
def head(model: LLaDA2MoeModelLM, hidden: Tensor) -> Tensor:
    """Logits in full precision."""
    return model.lm_head(hidden.float())


class Routes:
    """Listens to the routers of a training step: their load, and where copies of a token go."""

    def __init__(self, model: LLaDA2MoeModelLM) -> None:
        self.routers = [m for m in model.modules() if isinstance(m, LLaDA2TopKRouter)]
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []
        for router in self.routers:
            router.forward = torch.autocast("cpu", enabled=False)(router.forward)
            router.register_forward_hook(lambda _m, _i, output: self.seen.append(output))

    def load(self, masked: Tensor | None, weight: float) -> Tensor:
        """Tokens of each expert [layers, E]; masked ones count `weight`. masked: [tokens]."""
        rows = []
        for _, _, ids in self.seen:
            each = None
            if masked is not None and weight != 1:
                each = torch.where(masked, weight, 1.0)[:, None].expand_as(ids).flatten()
            experts = self.routers[0].config.num_experts
            rows.append(ids.flatten().bincount(each, minlength=experts).float())
        return torch.stack(rows)

    def alignment(self, noise: Tensor) -> Tensor:
        """Cross-entropy of a masked token's router against the route of the token that it hides.

        noise: [W, C, S]. The target is the applied weight of the clean copy, without gradient; the
        loss is the mean over masked tokens and layers.
        """
        where = noise.flatten(1)
        losses = []
        for logits, weights, ids in self.seen:
            logits, weights, ids = (
                x.unflatten(0, (len(noise), -1)) for x in (logits, weights, ids)
            )
            copies, length = noise.shape[1:]
            target = torch.zeros_like(logits[:, -length:]).scatter(
                2, ids[:, -length:], weights[:, -length:].detach()
            )
            target = target[:, None].expand(-1, copies, -1, -1)[noise]
            logs = logits[:, : copies * length][where].log_softmax(-1)
            losses.append(-(target * logs).sum(-1).mean() / target[0].sum())
        return torch.stack(losses).mean()


@torch.no_grad()
def held_out(
    model: LLaDA2MoeModelLM,
    corpus: Corpus,
    recipe: Recipe,
    blocks: tuple[int, ...] = (16, 32),
    windows: int = 48,
) -> dict[str, float]:
    """Loss on the first held-out windows with always the same noise, by block length."""
    clean = corpus.windows(np.arange(windows), recipe.length, recipe.seed, shuffle=False)
    losses = {}
    for block in blocks:
        rng = np.random.default_rng((recipe.seed, block))
        noise = tiny_data.stratified_noise(*clean.shape, block, rng)
        parts = [
            diffusion_loss(model, c, n[None], block).item()
            for c, n in zip(clean.split(6), noise.split(6), strict=True)
        ]
        losses[f"held_out_b{block}"] = sum(parts) / len(parts)
    return losses


@torch.no_grad()
def held_out_next(
    model: LLaDA2MoeModelLM, corpus: Corpus, recipe: Recipe, windows: int
) -> dict[str, float]:
    """The twin's loss on the same windows: the next token's."""
    clean = corpus.windows(np.arange(windows), recipe.length, recipe.seed, shuffle=False)
    parts = [autoregressive_loss(model, part).item() for part in clean.split(6)]
    return {"held_out_next": sum(parts) / len(parts)}
