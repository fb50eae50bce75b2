"""Attention of a training step: several copies of a window, none of which needs a mask.

A window is trained as [noisy copies … | clean]. A block of any copy sees itself and the clean
blocks before it; so one block's queries, of all copies, meet one dense rectangle of keys, and
nothing is computed to be masked out. Selected with `model.set_attn_implementation(NAME)`; the
forward takes `copies` and `block`, or neither for causal attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "oled_copies"


@torch.autocast("cpu", enabled=False)  # its backward pass is several times slower in bf16
def copies_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    copies: int = 0,
    block: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [W, n, copies·S, d], key and value [W, g, copies·S, d] -> [W, copies·S, n, d]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    query, key, value = (x.float() for x in (query, key, value))
    if not copies:
        whole = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return whole.transpose(1, 2), None
    query, key, value = (x.unflatten(2, (copies, -1)).transpose(1, 2) for x in (query, key, value))
    found = []
    for start in range(0, query.shape[3], block):
        here = slice(start, start + block)
        keys, values = (
            torch.cat((x[:, -1:, :, :start].expand(-1, copies, -1, -1, -1), x[:, :, :, here]), 3)
            for x in (key, value)
        )
        parts = (x.flatten(0, 1) for x in (query[:, :, :, here], keys, values))
        found.append(scaled_dot_product_attention(*parts, scale=scaling))
    context = torch.cat(found, dim=2).unflatten(0, (-1, copies))  # [W, copies, n, S, d]
    return context.permute(0, 1, 3, 2, 4).flatten(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, copies_attention)
