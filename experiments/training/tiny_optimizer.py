"""The optimizer of the small model: AdamW, or Muon for the matrices of its layers.

Muon (Jordan et al., 2024; the scale that makes AdamW's learning rate fit: Liu et al., 2025,
arXiv 2502.16982): the momentum of a matrix is replaced by the nearest semi-orthogonal matrix.
"""

from __future__ import annotations

import torch
from tiny_recipe import Recipe
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrices: Tensor, steps: int = 5) -> Tensor:
    """Singular values of [..., m, n] moved to about 1, by Newton-Schulz in bf16."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).float()


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay."""

    def __init__(self, params: list[nn.Parameter], weight_decay: float) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                if p.dim() == 3 and p.shape[1] > p.shape[2] // 2:  # gate over up: two matrices
                    update = update.unflatten(1, (2, -1))
                scale = 0.2 * max(update.shape[-2:]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(orthogonalized(update).view_as(p), alpha=group["lr"] * scale)


def optimizers(model: nn.Module, recipe: Recipe) -> list[Optimizer]:
    """Every parameter in exactly one of them; vectors do not decay."""
    named = dict(model.named_parameters())
    inner = [n for n, p in named.items() if p.dim() > 1 and ".layers." in n and ".gate.w" not in n]
    muon = set(inner) if recipe.muon else set()
    rest = [p for n, p in named.items() if n not in muon and p.dim() > 1]
    vectors = [p for p in named.values() if p.dim() == 1]
    groups = [
        {"params": rest, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    found: list[Optimizer] = [AdamW(groups, lr=0.0, betas=recipe.betas, fused=True)]
    if muon:
        found.append(Muon([named[n] for n in inner if n in muon], recipe.weight_decay))
    return found
