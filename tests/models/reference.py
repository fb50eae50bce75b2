"""LLaDA2 written out from the published checkpoint's keys, one token and one expert at a time.

It shares nothing with the module under test and is far too slow for anything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oled.models.llada2 import LLaDA2MoeConfig

Weights = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def swiglu(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return down @ (torch.sigmoid(gate @ x) * (gate @ x) * (up @ x))


def rotate(head: Tensor, position: int, config: LLaDA2MoeConfig) -> Tensor:
    """Pairs (j, j + r/2) of the first r dimensions turn by position · theta^(-2j/r)."""
    rotated = int(config.head_dim * config.partial_rotary_factor)
    out = head.clone()
    for j in range(rotated // 2):
        angle = torch.tensor(position * config.rope_theta ** (-2 * j / rotated))
        low, high = head[j], head[j + rotated // 2]
        out[j] = low * angle.cos() - high * angle.sin()
        out[j + rotated // 2] = high * angle.cos() + low * angle.sin()
    return out


def attention(
    x: Tensor, weights: Weights, prefix: str, visible: Tensor, config: LLaDA2MoeConfig
) -> Tensor:
    n, g, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    fused = (x @ weights[f"{prefix}.query_key_value.weight"].T).view(len(x), n + 2 * g, d)
    query = rms(fused[:, :n], weights[f"{prefix}.query_layernorm.weight"], config.rms_norm_eps)
    key = rms(fused[:, n : n + g], weights[f"{prefix}.key_layernorm.weight"], config.rms_norm_eps)
    value = fused[:, n + g :]
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(n):
            seen = visible[t].nonzero().flatten().tolist()
            q = rotate(query[t, h], t, config)
            keys = torch.stack([rotate(key[s, h * g // n], s, config) for s in seen])
            share = (keys @ q / d**0.5).softmax(0)
            heads.append(share @ value[seen, h * g // n])
        rows.append(weights[f"{prefix}.dense.weight"] @ torch.cat(heads))
    return torch.stack(rows)


def experts(x: Tensor, weights: Weights, prefix: str, config: LLaDA2MoeConfig) -> Tensor:
    scores = torch.sigmoid(weights[f"{prefix}.gate.weight"] @ x)
    biased = scores + weights[f"{prefix}.gate.expert_bias"]
    size = config.num_experts // config.n_group
    sums = [group.sort(descending=True).values[:2].sum().item() for group in biased.split(size)]
    groups = sorted(range(config.n_group), key=lambda g: -sums[g])[: config.topk_group]
    allowed = [e for e in range(config.num_experts) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -biased[e].item())[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen)
    out = swiglu(x, weights, f"{prefix}.shared_experts")
    for e in chosen:
        share = config.routed_scaling_factor * scores[e] / total
        out = out + share * swiglu(x, weights, f"{prefix}.experts.{e}")
    return out


def logits(ids: Tensor, visible: Tensor, weights: Weights, config: LLaDA2MoeConfig) -> Tensor:
    """ids [q], visible bool [q, q] -> logits [q, vocabulary]."""
    x = weights["model.word_embeddings.weight"][ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        normed = rms(x, weights[f"{prefix}.input_layernorm.weight"], config.rms_norm_eps)
        x = x + attention(normed, weights, f"{prefix}.attention", visible, config)
        normed = rms(x, weights[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
        dense = layer < config.first_k_dense_replace
        rows = [
            swiglu(row, weights, f"{prefix}.mlp")
            if dense
            else experts(row, weights, f"{prefix}.mlp", config)
            for row in normed
        ]
        x = x + torch.stack(rows)
    x = rms(x, weights["model.norm.weight"], config.rms_norm_eps)
    return x @ weights["lm_head.weight"].T
