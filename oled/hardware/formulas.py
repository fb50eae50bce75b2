"""The cost formulas: times in ns (float), vectorised over tokens, contexts and active experts.

Each function says where its form comes from; keys in brackets are those of the profiles'
sources. `reference/hardware.md` has the fits.
"""

from __future__ import annotations

import numpy as np

from oled.hardware.profile import Profile
from oled.hardware.shape import ExpertShape
from oled.models.catalogue import ModelGeometry, model_geometry
from oled.types import Doubles, Ints

OVERLAP_POWER = 1.5
"""Reading weights and arithmetic overlap in part: time = (read^p + arithmetic^p)^(1/p).

With the best launch time, rate and share of the peak, p = 1.5 fits the tokens x active grid of
[LLMS] (16 and more active experts, 1 to 2048 tokens) to 3.5 % rms and 8.3 % at worst; a sum (p = 1)
misses by up to 16 %, a plain maximum by up to 21 %. It keeps the time flat below 64 tokens and adds
0.12 to 0.26 us a token above, as measured there. Being a norm it is sub-additive: one launch group
never costs more than two that share its work.
"""
GROUP_TOKENS = 2048
"""Tokens up to which [LLMS] measured launch groups."""
ATTENTION_KEYS = 4096
"""Keys up to which [LLMS] measured the attention of a 16-token block."""

_MINI = model_geometry("llada2_mini")
_FLASH = model_geometry("llada2_flash")
_REFERENCE_KEYS = 768 + 16  # middle of the 512-1024 cached tokens of dense_layer_*, and its queries
_SECONDS = 1e9


def moe_layer_params(model: ModelGeometry) -> int:
    """Weights of a MoE layer without its routed experts: attention, router, shared experts."""
    beside = model.num_experts + 3 * model.shared_intermediate_size
    return model.attention_params + model.hidden_size * beside


DENSE_PARAMS = (moe_layer_params(_MINI), moe_layer_params(_FLASH))
"""Weights of the layers that `dense_layer_mini` and `dense_layer_flash` were derived for."""


def gpu_group(profile: Profile, expert: ExpertShape, tokens: Ints, active: Ints) -> Doubles:
    """One launch group: `moe_t0`, then the weights of `active` experts for `tokens` tokens.

    Every token carries top_k (token, expert) pairs. A launch takes at least 1 ns.
    Returns: float64[tokens, active].
    """
    read = active * expert.bytes / profile.moe_eff.base * _SECONDS
    rate = profile.bf16_peak.base * profile.moe_gemm_share.base
    arithmetic = tokens * expert.top_k * expert.flops / rate * _SECONDS
    p = OVERLAP_POWER
    work = (read[None, :] ** p + arithmetic[:, None] ** p) ** (1 / p)
    return np.asarray(max(1.0, profile.moe_t0.base) + work)


def cpu_expert(profile: Profile, expert: ExpertShape, tokens: Ints, tuned: bool) -> Doubles:
    """One expert on the CPU for `tokens` tokens: the larger of reading its weights and arithmetic.

    Tokens are padded to the tile of the matrix unit [KTA]. The framework kernel (not `tuned`) reads
    slower and reaches a quarter of the arithmetic. Returns: float64[tokens].
    """
    rate, gemm = (
        (profile.cpu_expert_tuned, profile.cpu_gemm_tuned)
        if tuned
        else (profile.cpu_expert_torch, profile.cpu_gemm_torch)
    )
    tile = profile.cpu_token_tile.base
    padded = np.ceil(tokens / tile) * tile
    read = np.where(tokens > 0, expert.bytes / rate.base, 0.0)
    return np.asarray(np.maximum(read, padded * expert.flops / gemm.base) * _SECONDS)


def copy(profile: Profile, size: int, pinned: bool, inward: bool = True) -> float:
    """One expert as one contiguous copy behind another, to the GPU (`inward`) or back.

    Latency and bytes at the link's rate, never less than the host call. A pageable copy blocks its
    caller, so it is never behind another: it has the isolated latency and its own on top.
    """
    if pinned:
        latency = profile.copy_queued.base
        rate = profile.h2d_pinned if inward else profile.d2h_pinned
    else:
        latency = profile.copy_isolated.base + profile.copy_pageable.base
        rate = profile.h2d_pageable if inward else profile.d2h_pageable
    return max(profile.memcpy_host_call.base, latency + size / rate.base * _SECONDS)


def copy_wake(profile: Profile, pinned: bool) -> float:
    """What a copy on an idle link costs on top of one behind another."""
    return max(0.0, profile.copy_isolated.base - profile.copy_queued.base) if pinned else 0.0


def crossing(profile: Profile, size: Ints, inward: bool) -> Doubles:
    """Activations of `size` bytes between GPU and host: half the fixed round trip, and the bytes.

    Returns: float64[size].
    """
    rate = profile.h2d_pinned if inward else profile.d2h_pinned
    return np.asarray(profile.act_roundtrip.base / 2 + size / rate.base * _SECONDS)


def dense_layer(
    profile: Profile, model: ModelGeometry, params: int, tokens: Ints, context: Ints
) -> Doubles:
    """A layer without its routed experts, for forwards of `tokens` over `context` cached tokens.

    A line through the profile's two points (LLaDA2.0-mini and -flash) in bytes of weights, with the
    attention over 784 keys taken out of the constant and put back for this forward's own keys
    (`attention_key` [LLMS]: linear from 256 to 4096 keys; the slope is assumed to grow with the KV
    bytes of a key). Weights and attention cost their arithmetic at `bf16_peak` where that is more,
    which makes long prefills expensive. Small kernels stay at their 16-token cost. Weights are
    bf16.

    At the ends of a profile, what lies below the mini's point (constant, fewer weights, fewer keys)
    is that of the whole profile, scaled with the point: a steeper attention at the same total would
    otherwise make a slow machine fast for small models and short contexts.

    Args: params: weights of the layer's dense part. Returns: float64[forwards].
    """
    constant, per_param, per_key = _below_mini(profile)
    beyond = profile.dense_layer_flash.base - profile.dense_layer_mini.base
    beyond_per_param = beyond / (DENSE_PARAMS[1] - DENSE_PARAMS[0])
    flops_per_ns = profile.bf16_peak.base / _SECONDS

    near, far = min(params, DENSE_PARAMS[0]), max(0, params - DENSE_PARAMS[0])
    weights = np.maximum(
        near * per_param + far * beyond_per_param, 2 * params * tokens / flops_per_ns
    )
    keys = context + tokens
    near_keys, far_keys = np.minimum(keys, _REFERENCE_KEYS), np.maximum(0, keys - _REFERENCE_KEYS)
    read = (_kv_bytes(model) / _kv_bytes(_MINI)) * (
        per_key * near_keys + profile.attention_key.base * far_keys
    )
    pair_flops = 4 * model.num_heads * model.head_dim  # scores and weighted values
    attention = np.maximum(read, pair_flops * tokens * keys / flops_per_ns)
    return np.asarray(constant + weights + attention)


def _below_mini(profile: Profile) -> tuple[float, float, float]:
    """Constant, time of a weight and of a key up to the mini's point, ns."""
    whole = profile.whole or profile
    mini, flash = whole.dense_layer_mini.base, whole.dense_layer_flash.base
    per_param = (flash - mini) / (DENSE_PARAMS[1] - DENSE_PARAMS[0])
    per_key = whole.attention_key.base
    constant = max(0.0, mini - per_param * DENSE_PARAMS[0] - per_key * _REFERENCE_KEYS)
    scale = profile.dense_layer_mini.base / mini
    return constant * scale, per_param * scale, per_key * scale


def _kv_bytes(model: ModelGeometry) -> float:
    return model.kv_bytes_per_token / model.num_layers


def head(profile: Profile, model: ModelGeometry, tokens: Ints, context: Ints) -> Doubles:
    """All of a forward outside its MoE layers: embedding, dense layers, final norm, lm_head.

    lm_head by bytes (vocabulary x hidden) against the mini's, or by arithmetic: logits are computed
    for every token of the forward. Embedding and norm are one small kernel each.
    Returns: float64[forwards].
    """
    params = model.vocab_size * model.hidden_size
    logits = np.maximum(
        profile.lm_head_mini.base * params / (_MINI.vocab_size * _MINI.hidden_size),
        2 * params * tokens / profile.bf16_peak.base * _SECONDS,
    )
    feed_forward = 3 * model.hidden_size * model.dense_intermediate_size
    dense_params = model.attention_params + feed_forward
    layer = dense_layer(profile, model, dense_params, tokens, context)
    return np.asarray(logits + 2 * profile.elementwise.base + model.dense_layers * layer)


def contention(profile: Profile, tuned: bool, pinned: bool) -> float:
    """Speed, as a share of 1, of CPU experts and of copies while both run.

    Together they get `dram_share` of the STREAM rate [FT436][FT232]; a pageable copy passes DRAM
    more than once.
    """
    cpu = (profile.cpu_expert_tuned if tuned else profile.cpu_expert_torch).base
    link = (
        profile.h2d_pinned.base
        if pinned
        else profile.h2d_pageable.base * profile.pageable_dram_passes.base
    )
    return min(1.0, profile.dram_share.base * profile.cpu_stream.base / (cpu + link))
