"""The cost formulas of experts and copies: times in ns (float), over tokens and active experts.

Each function says where its form comes from; keys in brackets are those of the profiles'
sources. `reference/hardware.md` has the fits.
"""

from __future__ import annotations

import numpy as np

from oled.hardware.profile import Profile
from oled.hardware.quantity import Quantity
from oled.hardware.shape import ExpertShape
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
_SECONDS = 1e9


def gpu_group(profile: Profile, expert: ExpertShape, tokens: Ints, active: Ints) -> Doubles:
    """One launch group: `moe_t0`, then the weights of `active` experts for `tokens` tokens.

    Every token carries top_k (token, expert) pairs. A launch takes at least 1 ns.
    Returns: float64[tokens, active].
    """
    read = active * expert.bytes / gpu_read_rate(profile) * _SECONDS
    rate = profile.bf16_peak.base * profile.moe_gemm_share.base
    arithmetic = tokens * expert.top_k * expert.flops / rate * _SECONDS
    p = OVERLAP_POWER
    work = (read[None, :] ** p + arithmetic[:, None] ** p) ** (1 / p)
    return np.asarray(max(1.0, profile.moe_t0.base) + work)


def cpu_expert(profile: Profile, expert: ExpertShape, tokens: Ints, tuned: bool) -> Doubles:
    """One expert on the CPU for `tokens` tokens: the larger of reading its weights and arithmetic.

    Weights are read at the kernel's rate, never faster than memory delivers them (STREAM). Tokens
    are padded to the tile of the matrix unit [KTA]. The framework kernel (not `tuned`) reads slower
    and reaches a quarter of the arithmetic. Returns: float64[tokens].
    """
    gemm = profile.cpu_gemm_tuned if tuned else profile.cpu_gemm_torch
    tile = profile.cpu_token_tile.base
    padded = np.ceil(tokens / tile) * tile
    read = np.where(tokens > 0, expert.bytes / cpu_read_rate(profile, tuned), 0.0)
    return np.asarray(np.maximum(read, padded * expert.flops / gemm.base) * _SECONDS)


def copy(profile: Profile, size: int, pinned: bool, inward: bool = True) -> float:
    """One expert as one contiguous copy behind another, to the GPU (`inward`) or back.

    Latency and bytes at the link's rate, never less than the host call. A pageable copy blocks its
    caller, so it is never behind another: it has the isolated latency and its own on top.
    """
    if pinned:
        latency = profile.copy_queued.base
    else:
        latency = profile.copy_isolated.base + profile.copy_pageable.base
    rate = link_rate(profile, pinned, inward)
    return max(profile.memcpy_host_call.base, latency + size / rate * _SECONDS)


def copy_wake(profile: Profile, pinned: bool) -> float:
    """What a copy on an idle link costs on top of one behind another."""
    return max(0.0, profile.copy_isolated.base - profile.copy_queued.base) if pinned else 0.0


def crossing(profile: Profile, size: Ints, inward: bool) -> Doubles:
    """Activations of `size` bytes between GPU and host: half the fixed round trip, and the bytes.

    Returns: float64[size].
    """
    rate = link_rate(profile, True, inward)
    return np.asarray(profile.act_roundtrip.base / 2 + size / rate * _SECONDS)


def contention(profile: Profile, size: int, tuned: bool, pinned: bool) -> float:
    """Speed, as a share of 1, of CPU experts and of copies of `size` bytes while both run.

    Together they get `dram_share` of the STREAM rate [FT436][FT232]. A copy asks for its bytes over
    its time, in which the latency carries none; a pageable copy passes DRAM more than once.
    """
    passes = 1.0 if pinned else profile.pageable_dram_passes.base
    link = passes * size / copy(profile, size, pinned) * _SECONDS
    asked = cpu_read_rate(profile, tuned) + link
    return min(1.0, profile.dram_share.base * profile.cpu_stream.base / asked)


def link_rate(profile: Profile, pinned: bool, inward: bool) -> float:
    """Bytes/s of a copy: what the link carries, never more than host memory delivers to it."""
    link, passes = link_of(profile, pinned, inward)
    return min(link.base, profile.cpu_stream.base / passes)


def link_of(profile: Profile, pinned: bool, inward: bool) -> tuple[Quantity, float]:
    """The link's own number, and how often its bytes pass DRAM."""
    if pinned:
        return (profile.h2d_pinned if inward else profile.d2h_pinned), 1.0
    own = profile.h2d_pageable if inward else profile.d2h_pageable
    return own, profile.pageable_dram_passes.base


def cpu_read_rate(profile: Profile, tuned: bool) -> float:
    """Bytes/s at which experts are read on the CPU: the smaller of the kernel's rate and STREAM."""
    kernel = profile.cpu_expert_tuned if tuned else profile.cpu_expert_torch
    return min(kernel.base, profile.cpu_stream.base)


def gpu_read_rate(profile: Profile) -> float:
    """Bytes/s at which a launch group reads experts, never faster than the GPU's memory."""
    return min(profile.moe_eff.base, profile.gpu_mem.base)
