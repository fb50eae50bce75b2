"""The cost formulas: times in ns (float), vectorised over tokens, contexts and active experts.

Each function says where its form comes from; keys in brackets are those of the profiles'
sources. `reference/hardware.md` has the fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled.hardware.profile import Profile
from oled.hardware.shape import FLASH_LAYER_BYTES, MINI_LAYER_BYTES, DenseShape, ExpertShape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

OVERLAP_POWER = 1.5
"""Reading weights and arithmetic overlap in part: time = (read^p + arithmetic^p)^(1/p).

p = 1.5 fits the tokens x active grid of [LLMS] (16 and more active experts, 1 to 2048 tokens) to
3.5 % rms and 8.3 % at worst; a sum (p = 1) misses by up to 16 %, a plain maximum by up to 21 %. It
keeps the time flat below 64 tokens and adds 0.12 to 0.26 us a token above, as measured there. Being
a norm it is sub-additive: one launch group never costs more than two that share its work.
"""
GROUP_TOKENS = 2048
"""Tokens up to which [LLMS] measured launch groups."""
ATTENTION_KEYS = 4096
"""Keys up to which [LLMS] measured the attention of a 16-token block."""

_REFERENCE_KEYS = 768 + 16  # middle of the 512-1024 cached tokens of dense_layer_*, and its queries
_REFERENCE_KV_BYTES = 2 * 4 * 128 * 2  # K and V of 4 heads of 128 in bf16: mini and flash alike
_REFERENCE_HEAD_PARAMS = 157184 * 2048  # lm_head of LLaDA2.0-mini
_SECONDS = 1e9


def gpu_group(profile: Profile, expert: ExpertShape, tokens: Ints, active: Ints) -> Floats:
    """One launch group beyond its `moe_t0`: weights of `active` experts for `tokens` tokens.

    Every token carries top_k (token, expert) pairs. Returns: float64[tokens, active].
    """
    read = active * expert.bytes / profile.moe_eff.base * _SECONDS
    rate = profile.bf16_peak.base * profile.moe_gemm_share.base
    arithmetic = tokens * expert.top_k * expert.flops / rate * _SECONDS
    p = OVERLAP_POWER
    return np.asarray((read[None, :] ** p + arithmetic[:, None] ** p) ** (1 / p))


def cpu_expert(profile: Profile, expert: ExpertShape, tokens: Ints, tuned: bool) -> Floats:
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


def dense_layer(
    profile: Profile, shape: DenseShape, params: int, tokens: Ints, context: Ints
) -> Floats:
    """A layer without its routed experts, for forwards of `tokens` over `context` cached tokens.

    A line through the profile's two points (LLaDA2.0-mini and -flash) in bytes of weights, with the
    attention over 784 keys taken out of the constant and put back for this forward's own keys
    (`attention_key` [LLMS]: linear from 256 to 4096 keys; the slope is assumed to grow with the KV
    bytes of a key). Weights and attention cost their arithmetic at `bf16_peak` where that is more,
    which makes long prefills expensive. Small kernels stay at their 16-token cost.

    Args: params: weights of the layer's dense part. Returns: float64[forwards].
    """
    per_byte = (profile.dense_layer_flash.base - profile.dense_layer_mini.base) / (
        FLASH_LAYER_BYTES - MINI_LAYER_BYTES
    )
    constant = (
        profile.dense_layer_mini.base
        - per_byte * MINI_LAYER_BYTES
        - profile.attention_key.base * _REFERENCE_KEYS
    )
    flops_per_ns = profile.bf16_peak.base / _SECONDS
    weights = np.maximum(
        2 * params * per_byte,  # bf16: the points of the line are too
        2 * params * tokens / flops_per_ns,
    )
    keys = context + tokens
    attention = np.maximum(
        profile.attention_key.base * shape.kv_bytes / _REFERENCE_KV_BYTES * keys,
        4 * shape.attention_width * tokens * keys / flops_per_ns,
    )
    return np.asarray(max(0.0, constant) + weights + attention)


def head(profile: Profile, shape: DenseShape, tokens: Ints, context: Ints) -> Floats:
    """All of a forward outside its MoE layers: embedding, dense layers, final norm, lm_head.

    lm_head by bytes (vocabulary x hidden) against the mini's, or by arithmetic: logits are computed
    for every token of the forward. Embedding and norm are one small kernel each.
    Returns: float64[forwards].
    """
    params = shape.vocabulary * shape.hidden
    logits = np.maximum(
        profile.lm_head_mini.base * params / _REFERENCE_HEAD_PARAMS,
        2 * params * tokens / profile.bf16_peak.base * _SECONDS,
    )
    total = logits + 2 * profile.elementwise.base
    if shape.dense_layers:
        layer = dense_layer(profile, shape, shape.dense_layer_params, tokens, context)
        total = total + shape.dense_layers * layer
    return np.asarray(total)


def contention(profile: Profile, tuned: bool, pinned: bool) -> float:
    """Speed, as a share of 1, of CPU experts and of copies while both run.

    Together they get `dram_share` of the STREAM rate [FT436][FT232]; a pageable copy passes DRAM
    more than once.
    """
    cpu = (profile.cpu_expert_tuned if tuned else profile.cpu_expert_torch).base
    link = profile.h2d_pinned.base if pinned else profile.h2d_pageable.base
    if not pinned:
        link *= profile.pageable_dram_passes.base
    return min(1.0, profile.dram_share.base * profile.cpu_stream.base / (cpu + link))
