"""The arithmetic of experts as matrix products of torch, wherever the tensors are.

Letters as in `oled.live.kernels`: T tokens, k top-k, H hidden size, I width, S numbers of one
expert; n pairs of token and expert, those of an expert one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from oled.live.kernels import SILU, ExpertForm

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def compute(
    rows: Sequence[Tensor],
    counts: Sequence[int],
    x: Tensor,
    between: Tensor,
    y: Tensor,
    form: ExpertForm,
) -> None:
    """Outputs of experts `rows`, each [S], for `counts` of the pairs; without routing weights.

    x [n, H], between [n, 2 I] (written), y [n, H] (written), all in one dtype, which is also that
    of the sums' results: two products an expert, one activation for all.
    """
    hidden, width = form.hidden, form.width
    down = 2 * width * hidden
    bias = down + hidden * width
    ends = _ends(counts)
    for row, begin, end in zip(rows, [0, *ends], ends, strict=False):
        weights = row[:down].view(2 * width, hidden).t()
        added = row[bias : bias + 2 * width] if form.biased else None
        _product(x[begin:end], weights, added, between[begin:end])
    gated = _gate(between, form)
    for row, begin, end in zip(rows, [0, *ends], ends, strict=False):
        weights = row[down:bias].view(hidden, width).t()
        added = row[bias + 2 * width :] if form.biased else None
        _product(gated[begin:end], weights, added, y[begin:end])


def _ends(counts: Sequence[int]) -> list[int]:
    ends, end = [], 0
    for count in counts:
        end += count
        ends.append(end)
    return ends


def _product(x: Tensor, weights: Tensor, added: Tensor | None, out: Tensor) -> None:
    if added is None:
        torch.mm(x, weights, out=out)
    else:
        torch.addmm(added, x, weights, out=out)


def _gate(between: Tensor, form: ExpertForm) -> Tensor:
    """[n, 2 I] -> [n, I]."""
    if form.interleaved:
        gate, up = between[:, ::2], between[:, 1::2]
    else:
        gate, up = between[:, : form.width], between[:, form.width :]
    if form.activation == SILU:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return (up + 1) * (gate * torch.sigmoid(form.alpha * gate))
