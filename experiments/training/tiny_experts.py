"""An experts function that makes training many small experts fast on a CPU.

(token, slot) pairs are laid out by expert; experts with about as many pairs form groups, padded to
the longest, and a group is one `torch.bmm`. Under autocast all of it computes in bf16, which a CPU
with AVX-512 BF16 multiplies several times faster, if the product is large enough. Selected with
`model.set_experts_implementation(NAME)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "oled_grouped_bmm"
GROUP = 8  # experts of one product
ROUND = 16  # rows of a group are padded to a multiple: a kernel is generated for every shape


class Group(NamedTuple):
    """Some experts (places in the layout's order) and their rows, `longest` for each."""

    experts: slice
    rows: slice
    longest: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where (token, slot) pairs stand. order: int[E], experts by falling number of pairs;
    row: int[T, k], the pair's row; token: int[rows], T where a row is padding."""

    order: Tensor
    row: Tensor
    token: Tensor
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> Layout:
        """ids: [T, k]."""
        flat = ids.flatten()
        counts = flat.bincount(minlength=experts)
        falling, order = counts.sort(descending=True, stable=True)
        longest = (-(-falling[::GROUP] // ROUND) * ROUND).tolist()
        groups, starts, end = [], torch.empty_like(counts), 0
        for number, rows in enumerate(longest):
            here = slice(number * GROUP, min((number + 1) * GROUP, experts))
            size = here.stop - here.start
            starts[order[here]] = end + rows * torch.arange(size)
            if rows:
                groups.append(Group(here, slice(end, end + size * rows), rows))
            end += size * rows
        sorted_pairs = flat.argsort(stable=True)
        first = counts.cumsum(0) - counts
        rank = torch.empty_like(flat)
        rank[sorted_pairs] = torch.arange(len(flat)) - first[flat[sorted_pairs]]
        row = starts[flat] + rank
        token = torch.full((end,), len(ids))
        token[row] = torch.arange(len(flat)) // ids.shape[1]
        return cls(order, row.view_as(ids), token, tuple(groups))

    def spread(self, x: Tensor) -> Tensor:
        """[T, n] -> [rows, n], zero where a row is padding."""
        return torch.cat((x, x.new_zeros(1, x.shape[1])))[self.token]

    def collect(self, rows: Tensor, scale: Tensor | None = None) -> Tensor:
        """Sum over each token's k rows, times scale [T, k]: [rows, n] -> [T, n].

        Slot by slot, in fp32: torch's own sums in bf16 are slow.
        """
        total = torch.zeros(len(self.row), rows.shape[1])
        for slot, row in enumerate(self.row.unbind(1)):
            part = rows[row]
            total += part if scale is None else part * scale[:, slot, None]
        return total

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """[rows, m] times each expert's [E, m, n] in the layout's order -> [rows, n]."""
        out = rows.new_empty(len(rows), matrices.shape[2])
        for group in self.groups:
            shape = (-1, group.longest)
            torch.bmm(
                rows[group.rows].unflatten(0, shape),
                matrices[group.experts],
                out=out[group.rows].unflatten(0, shape),
            )
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Each expert's left^T right [E, m, n] of its rows, in the experts' own order, fp32."""
        out = left.new_zeros(len(self.order), left.shape[1], right.shape[1])
        for group in self.groups:
            shape = (-1, group.longest)
            torch.bmm(
                left[group.rows].unflatten(0, shape).mT,
                right[group.rows].unflatten(0, shape),
                out=out[group.experts],
            )
        return out[self.order.argsort()].float()


class _GroupedExperts(torch.autograd.Function):
    """x [T, h], ids and weights [T, k], gate_up [E, 2i, h], down [E, h, i] -> [T, h] (SwiGLU)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        narrow = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if narrow else x.dtype
        layout = Layout.of(ids, len(gate_up))
        gate_up, down = (m.to(dtype)[layout.order] for m in (gate_up, down))
        rows = layout.spread(x.to(dtype))
        hidden = layout.product(rows, gate_up.mT)
        gate, up = hidden.chunk(2, dim=-1)
        inner = nn.functional.silu(gate) * up
        result = layout.product(inner, down.mT)
        scale = weights.to(dtype)
        ctx.save_for_backward(rows, scale, hidden, inner, result, gate_up, down)
        ctx.layout = layout
        return layout.collect(result, scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale, hidden, inner, result, gate_up, down = ctx.saved_tensors
        layout, narrow = ctx.layout, grad.to(rows.dtype)
        grad_weights = torch.stack(
            [(result[row].float() * grad).sum(-1) for row in layout.row.unbind(1)], dim=1
        )
        row_scale = scale.new_zeros(len(rows)).index_copy_(0, layout.row.flatten(), scale.flatten())
        grad_rows = layout.spread(narrow) * row_scale[:, None]
        grad_inner = layout.product(grad_rows, down)
        grad_down = layout.outer(grad_rows, inner)
        gate, up = hidden.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        grad_gate = grad_inner * up * (sigmoid + silu * (1 - sigmoid))
        grad_hidden = torch.cat((grad_gate, grad_inner * silu), dim=-1)
        grad_x = layout.collect(layout.product(grad_hidden, gate_up))
        grad_gate_up = layout.outer(grad_hidden, rows)
        return grad_x.to(grad.dtype), None, grad_weights, grad_gate_up, grad_down


def grouped_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The `ALL_EXPERTS_FUNCTIONS` signature over `_GroupedExperts`."""
    return _GroupedExperts.apply(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
