"""An experts function that makes training many small experts fast on a CPU.

(token, slot) pairs are sorted by expert, every expert is one `torch.mm` into its slice of a shared
buffer, and the backward pass does the same: a few thousand small products a step, no autograd
bookkeeping between them. Selected with `model.set_experts_implementation(NAME)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "oled_sorted_mm"


class _SortedExperts(torch.autograd.Function):
    """x [T, h], ids and weights [T, k], gate_up [E, 2i, h], down [E, h, i] -> [T, h] (SwiGLU)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=len(gate_up)).tolist()
        rows = x[order // ids.shape[1]]
        scale = weights.flatten()[order, None]
        hidden = x.new_empty(len(order), gate_up.shape[1])
        for inp, matrix, out in zip(rows.split(counts), gate_up, hidden.split(counts), strict=True):
            torch.mm(inp, matrix.T, out=out)
        gate, up = hidden.chunk(2, dim=-1)
        inner = nn.functional.silu(gate) * up
        result = torch.empty_like(rows)
        for inp, matrix, out in zip(inner.split(counts), down, result.split(counts), strict=True):
            torch.mm(inp, matrix.T, out=out)
        ctx.save_for_backward(order, rows, scale, hidden, inner, result, gate_up, down)
        ctx.counts, ctx.k = counts, ids.shape[1]
        return _sum_slots(result * scale, order, ctx.k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, rows, scale, hidden, inner, result, gate_up, down = ctx.saved_tensors
        counts = ctx.counts
        grad_rows = grad[order // ctx.k]
        grad_weights = torch.empty_like(scale[:, 0])
        grad_weights[order] = (grad_rows * result).sum(-1)
        grad_rows = grad_rows * scale
        grad_inner, grad_down = _linear_backward(grad_rows, inner, down, counts)
        gate, up = hidden.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        grad_gate = grad_inner * up * (sigmoid + silu * (1 - sigmoid))
        grad_hidden = torch.cat((grad_gate, grad_inner * silu), dim=-1)
        grad_x, grad_gate_up = _linear_backward(grad_hidden, rows, gate_up, counts)
        grad_x = _sum_slots(grad_x, order, ctx.k)
        return grad_x, None, grad_weights.view(-1, ctx.k), grad_gate_up, grad_down


def _sum_slots(sorted_rows: Tensor, order: Tensor, k: int) -> Tensor:
    """Put rows [T·k, h], sorted by expert, back in token order and add up each token's k rows."""
    restored = torch.empty_like(sorted_rows).index_copy_(0, order, sorted_rows)
    return restored.unflatten(0, (-1, k)).sum(1)


def _linear_backward(
    grad: Tensor, inp: Tensor, weight: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of inp and of weight for `out = inp @ weight[e].T`, expert by expert."""
    grad_inp, grad_weight = torch.empty_like(inp), torch.empty_like(weight)
    slices = zip(
        grad.split(counts),
        inp.split(counts),
        weight,
        grad_inp.split(counts),
        grad_weight,
        strict=True,
    )
    for g, x, matrix, out_inp, out_weight in slices:
        torch.mm(g, matrix, out=out_inp)
        torch.mm(g.T, x, out=out_weight)
    return grad_inp, grad_weight


def sorted_mm_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The `ALL_EXPERTS_FUNCTIONS` signature over `_SortedExperts`."""
    return _SortedExperts.apply(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, sorted_mm_experts)
