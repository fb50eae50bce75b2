"""What a forward costs outside its routed experts: attention, dense weights, logits; float ns.

Source keys in [brackets] are those of the profiles.
"""

from __future__ import annotations

import numpy as np

from oled.hardware.formulas import gpu_read_rate
from oled.hardware.profile import Profile
from oled.models.catalogue import ModelGeometry, model_geometry
from oled.models.quant import BF16
from oled.trace.steps import Rows
from oled.types import Doubles, Ints

ATTENTION_KEYS = 4096
"""Keys up to which [LLMS] measured the attention of a 16-token block."""

_MINI = model_geometry("llada2_mini")
_FLASH = model_geometry("llada2_flash")
_REFERENCE_KEYS = 768 + 16  # middle of the 512-1024 cached tokens of dense_layer_*, and its queries
_SECONDS = 1e9

DENSE_PARAMS = (_MINI.moe_layer_params, _FLASH.moe_layer_params)
"""Weights of the layers that `dense_layer_mini` and `dense_layer_flash` were derived for."""


def dense_layer(
    profile: Profile, model: ModelGeometry, params: int, tokens: Ints, rows: Rows
) -> Doubles:
    """Return the time of a layer without its routed experts, for forwards of `tokens` [F].

    A line through the profile's two points (LLaDA2.0-mini and -flash) in bytes of weights, with the
    attention over 784 keys taken out of the constant and put back for this forward's own `rows`
    (see `attention`). Weights cost their arithmetic at `bf16_peak` where that is more, which makes
    long prefills expensive. Small kernels stay at their 16-token cost.

    At the ends of a profile, what lies below the mini's point (constant, fewer weights, fewer keys)
    is that of the whole profile, scaled with the point: a steeper attention at the same total would
    otherwise make a slow machine fast for small models and short contexts.

    Args: params: weights of the layer's dense part. Returns: float64[forwards].
    """
    constant, per_param, _ = _below_mini(profile)
    beyond = profile.dense_layer_flash.base - profile.dense_layer_mini.base
    beyond_per_param = beyond / (DENSE_PARAMS[1] - DENSE_PARAMS[0])
    stored = params * model.dense_weight_bytes / BF16  # the points are of bf16 weights
    near, far = min(stored, DENSE_PARAMS[0]), max(0.0, stored - DENSE_PARAMS[0])
    weights = np.maximum(
        near * per_param + far * beyond_per_param,
        2 * params * tokens / profile.bf16_peak.base * _SECONDS,
    )
    return np.asarray(constant + weights + attention(profile, model, rows, tokens.size))


def attention(profile: Profile, model: ModelGeometry, rows: Rows, forwards: int) -> Doubles:
    """Return the attention of a layer over the keys of each forward's rows: float64[forwards].

    Each row attends to its own keys. A row of several tokens by itself takes `attention_key` a key
    ([LLMS]: linear from 256 to 4096 keys, the same for 16 and 32 queries; the slope is assumed to
    grow with the KV bytes of a key): one sequence fills few of the GPU's units, and the slope is
    about 16 times what its KV bytes cost. Rows of a batch fill the others, so that together they
    take what the longest row takes, or the sum over the rows of the KV bytes at `moe_eff` or of the
    arithmetic at `bf16_peak` where that is more. A single query is split over the keys and reads at
    `moe_eff` by itself. [AIC] on the RTX PRO 6000, its launch of 10 to 15 us included: 32 rows of
    one query over 1023 keys 40 us, by bytes 44; over 4095 keys 201 us, by bytes 175.

    Layers with a window have at most as many keys a query; the time is the mean over the layers.
    """
    windowed = model.window_layers / model.num_layers
    keys = rows.context + rows.tokens
    times = (1 - windowed) * _over_keys(profile, model, rows, keys, keys, forwards)
    if windowed:
        seen = np.minimum(keys, model.window)
        read = np.minimum(keys, model.window + rows.tokens - 1)
        times += windowed * _over_keys(profile, model, rows, read, seen, forwards)
    return times


def _over_keys(
    profile: Profile, model: ModelGeometry, rows: Rows, read: Ints, seen: Ints, forwards: int
) -> Doubles:
    """Return the attention over `read` keys of a row, of which each of its tokens sees `seen`."""
    of_bytes = model.kv_bytes_per_layer / _MINI.kv_bytes_per_layer
    _, _, per_key = _below_mini(profile)
    near, far = np.minimum(read, _REFERENCE_KEYS), np.maximum(0, read - _REFERENCE_KEYS)
    alone = of_bytes * (per_key * near + profile.attention_key.base * far)
    by_bytes = read * model.kv_bytes_per_layer / gpu_read_rate(profile) * _SECONDS
    pair_flops = 4 * model.num_heads * model.head_dim  # scores and weighted values
    by_flops = pair_flops * rows.tokens * seen / profile.bf16_peak.base * _SECONDS
    longest = np.zeros(forwards)
    np.maximum.at(longest, rows.forward, np.where(rows.tokens == 1, by_bytes, alone))
    sums = [np.bincount(rows.forward, work, forwards) for work in (by_bytes, by_flops)]
    return np.maximum(longest, np.maximum(*sums))


def _below_mini(profile: Profile) -> tuple[float, float, float]:
    """Return the constant, the time of a weight and of a key up to the mini's point, ns."""
    whole = profile.whole or profile
    mini, flash = whole.dense_layer_mini.base, whole.dense_layer_flash.base
    per_param = (flash - mini) / (DENSE_PARAMS[1] - DENSE_PARAMS[0])
    per_key = whole.attention_key.base
    constant = max(0.0, mini - per_param * DENSE_PARAMS[0] - per_key * _REFERENCE_KEYS)
    scale = profile.dense_layer_mini.base / mini
    return constant * scale, per_param * scale, per_key * scale


def head(profile: Profile, model: ModelGeometry, tokens: Ints, rows: Rows) -> Doubles:
    """Return all of a forward outside its MoE layers: embedding, dense layers, norm, lm_head.

    lm_head by bytes (vocabulary x hidden) against the mini's, or by arithmetic: logits are computed
    for every token of the forward. Embedding and norm are one small kernel each.
    Returns: float64[forwards].
    """
    params = model.vocab_size * model.hidden_size
    of_mini = params / (_MINI.vocab_size * _MINI.hidden_size)
    logits = np.maximum(
        profile.lm_head_mini.base * of_mini * model.dense_weight_bytes / BF16,
        2 * params * tokens / profile.bf16_peak.base * _SECONDS,
    )
    feed_forward = model.matrices * model.hidden_size * model.dense_intermediate_size
    dense_params = model.attention_params + feed_forward
    layer = dense_layer(profile, model, dense_params, tokens, rows)
    return np.asarray(logits + 2 * profile.elementwise.base + model.dense_layers * layer)
