"""Attention of LLaDA2: norm, partial rotary embedding, masks. Shapes as in `modeling_llada2`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_llada2 import LLaDA2MoeConfig


class LLaDA2RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary_tables(config: LLaDA2MoeConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 cosine and sine [b, 1, q, r] for positions [b, q]; r: rotated part of a head."""
    rope = config.rope_parameters or {}
    rotated = int(config.head_dim * rope["partial_rotary_factor"])
    exponents = torch.arange(0, rotated, 2, device=positions.device, dtype=torch.float32) / rotated
    frequencies = rope["rope_theta"] ** -exponents
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r dimensions of x [b, heads, q, d] half against half; the rest passes."""
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return torch.cat((rotated * cos + turned * sin, passed), dim=-1)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attend: query [b, n, q, d], key and value [b, g, s, d] -> [b, q, n, d], weights."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


class LLaDA2Attention(nn.Module):
    """Grouped-query attention, fused q/k/v projection, per-head norm of q and k before rope."""

    is_causal = False  # the caller's mask is the whole truth

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        fused = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, fused, bias=config.use_qkv_bias)
        if config.use_qk_norm:
            self.query_layernorm = LLaDA2RMSNorm(config.head_dim, config.rms_norm_eps)
            self.key_layernorm = LLaDA2RMSNorm(config.head_dim, config.rms_norm_eps)
        width = config.num_attention_heads * config.head_dim
        self.dense = nn.Linear(width, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        cache: Cache | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden [b, q, h] -> [b, q, h] and attention weights if the kernel returns them."""
        n, g = self.config.num_attention_heads, self.config.num_key_value_heads
        fused = self.query_key_value(hidden).unflatten(-1, (n + 2 * g, -1)).transpose(1, 2)
        query, key, value = fused.split((n, g, g), dim=1)
        if self.config.use_qk_norm:
            query, key = self.query_layernorm(query), self.key_layernorm(key)
        query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        context, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.config.head_dim**-0.5,
            dropout=self.config.attention_dropout if self.training else 0.0,
            **kwargs,
        )
        return self.dense(context.flatten(-2)), weights


def additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a caller's mask into one that is added to the scores.

    mask: None (everything visible), [b, s] (1 = a real key), or [b or 1, 1, q, s], boolean (True =
    visible) or float (added as it is). Nothing causal is ever put on top.
    """
    if mask is None:
        return None
    if mask.dim() == 2:
        mask = mask.bool()[:, None, None, :]
    elif mask.dim() != 4:
        raise ValueError(f"attention_mask has {mask.dim()} dimensions; expected 2 or 4")
    if mask.dtype == torch.bool:
        blocked = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return blocked.masked_fill(~mask, torch.finfo(dtype).min)
    if not mask.is_floating_point():
        raise ValueError(f"a 4-D attention_mask is boolean or floating, not {mask.dtype}")
    return mask.to(dtype)
