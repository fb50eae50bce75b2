"""What draft experts learn: to make the draft of a frozen model agree with the model.

A window is seen as in training, [noisy | clean]: a noisy block sees itself and the clean blocks
before it, as a denoising forward sees its cache. The clean half is always the model's; the noisy
one is computed twice, by the model (the teacher) and by its draft (the student).

Letters: W windows, S positions of a window, L MoE layers, N noisy tokens, M masked ones, h hidden
size, E experts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tiny_data
import torch
from torch import Tensor, nn
from torch.nn import functional

from oled.models.llada2 import LLaDA2MoeModelLM
from oled.running.drafting import DraftExperts
from oled.running.hooks import Compute, replace_experts
from oled.running.modules import moe_layers


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the four terms; that there are these four is published, the weights are ours."""

    logits: float = 1.0
    token: float = 0.1
    residual: float = 1.0
    router: float = 0.02  # of a sum over E experts


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One pass over the noisy half."""

    routed: list[Tensor]  # [N, h] by layer: what the routed part adds
    routers: list[Tensor]  # [N, E] logits
    ids: list[Tensor]  # [N, k]
    logits: Tensor  # [M, V]


class Distillation:
    """A frozen model, and its draft with these experts (None: none) while they learn."""

    def __init__(self, model: LLaDA2MoeModelLM, experts: DraftExperts | None, block: int) -> None:
        self.model, self.experts, self.block = model, experts, block
        self._layers = moe_layers(model)
        self._routers = [entry.modules[0].router for entry in self._layers]

    def run(self, clean: Tensor, noise: Tensor, *, draft: bool) -> Seen:
        """clean [W, S] and what is masked of it [W, S]; by the draft, or by the model."""
        windows, length = clean.shape
        ids, positions = tiny_data.copies(clean, noise[:, None], self.model.config.mask_token_id)
        routed: list[Tensor] = []
        heard: list[tuple[Tensor, Tensor]] = []

        def noisy(x: Tensor) -> Tensor:
            return x.unflatten(0, (windows, -1))[:, :length].flatten(0, 1)

        def function(
            row: int, compute: Compute, hidden: Tensor, ids: Tensor, weights: Tensor
        ) -> Tensor:
            if not draft:
                output = compute(hidden, ids, weights)
                routed.append(noisy(output))
                return output
            mine, best = noisy(hidden), noisy(weights).argmax(-1, keepdim=True)
            chosen = (noisy(ids).gather(-1, best), noisy(weights).gather(-1, best))
            part = compute(mine, *chosen)
            if self.experts is not None:
                part = part + self.experts.output(row, mine)
            routed.append(part)
            with torch.no_grad():
                others = [
                    x.unflatten(0, (windows, -1))[:, length:].flatten(0, 1)
                    for x in (hidden, ids, weights)
                ]
                clean_part = compute(*others)
            whole = (x.unflatten(0, (windows, -1)) for x in (part, clean_part))
            return torch.cat(tuple(whole), dim=1).flatten(0, 1)

        def listen(_: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
            heard.append((noisy(output[0]), noisy(output[2])))

        hooks = [router.register_forward_hook(listen) for router in self._routers]
        with replace_experts(self._layers, function):
            hidden = self.model.model(ids, position_ids=positions, copies=2, block=self.block)
        for hook in hooks:
            hook.remove()
        logits = self.model.lm_head(hidden.last_hidden_state[:, :length][noise])
        routers, chosen = zip(*heard, strict=True)
        return Seen(routed, list(routers), list(chosen), logits)

    def loss(self, clean: Tensor, noise: Tensor, weights: Weights) -> Tensor:
        """Logit KL, cross-entropy of the model's token, relative residual MSE, router KL."""
        with torch.no_grad():
            teacher = self.run(clean, noise, draft=False)
        student = self.run(clean, noise, draft=True)
        terms = (
            weights.logits * logit_divergence(teacher, student),
            weights.token * functional.cross_entropy(student.logits, teacher.logits.argmax(-1)),
            weights.residual * residual_error(teacher, student),
            weights.router * router_divergence(teacher, student),
        )
        return torch.stack(terms).sum()

    @torch.no_grad()
    def judge(self, clean: Tensor, noise: Tensor) -> dict[str, float]:
        """How the draft agrees with the model: masked tokens with the same choice, routed experts
        that it predicts, and the terms of the loss."""
        teacher, student = (self.run(clean, noise, draft=draft) for draft in (False, True))
        same = student.logits.argmax(-1) == teacher.logits.argmax(-1)
        recalled = [
            (true[:, :, None] == said[:, None, :]).any(-1).float().mean()
            for true, said in zip(teacher.ids, student.ids, strict=True)
        ]
        return {
            "same_token": same.float().mean().item(),
            "experts_predicted": torch.stack(recalled).mean().item(),
            "logit_divergence": logit_divergence(teacher, student).item(),
            "residual_error": residual_error(teacher, student).item(),
            "router_divergence": router_divergence(teacher, student).item(),
        }


def logit_divergence(teacher: Seen, student: Seen) -> Tensor:
    """KL of the model's tokens from the draft's, nats a masked token."""
    logs = (student.logits.log_softmax(-1), teacher.logits.log_softmax(-1))
    return functional.kl_div(*logs, log_target=True, reduction="batchmean")


def residual_error(teacher: Seen, student: Seen) -> Tensor:
    """Squared distance of what the routed parts add, over its square; mean of the layers."""
    errors = [
        functional.mse_loss(said, true) / true.square().mean()
        for true, said in zip(teacher.routed, student.routed, strict=True)
    ]
    return torch.stack(errors).mean()


def router_divergence(teacher: Seen, student: Seen) -> Tensor:
    """KL of the routers' scores, E independent ones of a sigmoid router; mean of the layers."""
    found = []
    for true, said in zip(teacher.routers, student.routers, strict=True):
        target = true.sigmoid()
        cross = functional.binary_cross_entropy_with_logits(said, target, reduction="sum")
        least = functional.binary_cross_entropy_with_logits(true, target, reduction="sum")
        found.append((cross - least) / len(true))
    return torch.stack(found).mean()
