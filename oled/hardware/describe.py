"""A profile in words: its numbers, and what they mean for one model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oled.hardware import formulas
from oled.hardware.costs import cpu_expert_ns
from oled.hardware.profile import DTYPE_BYTES, Profile
from oled.hardware.shape import ExpertShape
from oled.models.geometry import ModelGeometry
from oled.models.quant import BF16

_MOST_TOKENS = 4096


def crossover(profile: Profile, expert: ExpertShape, tuned: bool, pinned: bool = True) -> int:
    """The most tokens for which one CPU expert, with its call, beats one copy in a full queue.

    0 where the copy always wins, 4096 where the CPU still wins there.
    """
    cpu = cpu_expert_ns(profile, expert, _MOST_TOKENS, tuned)[1:] + profile.cpu_call.base
    return int(np.count_nonzero(cpu < formulas.copy(profile, expert.bytes, pinned)))


def crossovers(profile: Profile, model: ModelGeometry) -> str:
    """Up to how many tokens of an expert the CPU is faster than a copy, for both kernels."""
    expert = _expert(profile, model)
    found = {kind: crossover(profile, expert, kind == "tuned") for kind in ("tuned", "torch")}
    words = {
        kind: f"up to {tokens} tokens" if tokens else "never" for kind, tokens in found.items()
    }
    return (
        f"one expert of {model.name} is faster on the CPU than as a pinned copy "
        f"{words['tuned']} (tuned kernel), {words['torch']} (PyTorch)"
    )


def _expert(profile: Profile, model: ModelGeometry) -> ExpertShape:
    """One of a model that is published in bf16, in the numbers that the profile was taken with."""
    expert = ExpertShape.of(model, model.top_k)
    if model.weight_bytes != BF16:
        return expert
    return replace(expert, bytes=round(expert.bytes * DTYPE_BYTES[profile.dtype] / BF16))


def describe(profile: Profile, model: ModelGeometry) -> str:
    """Lines for a terminal: each number with spread, tag and source, then times of one expert."""
    numbers = [
        f"  {name:21} {f'{q.value:g} {q.unit}':>12}  {f'{q.low:g}-{q.high:g}':>13}  "
        f"{q.tag:9} {q.source}"
        for name, q in profile.quantities().items()
    ]
    expert = _expert(profile, model)
    one = np.array([1])
    times = [
        (f"copy, {kind}", formulas.copy(profile, expert.bytes, kind == "pinned"))
        for kind in ("pinned", "pageable")
    ] + [
        (
            f"CPU, 1 token, {kind} kernel",
            profile.cpu_call.base + formulas.cpu_expert(profile, expert, one, kind == "tuned")[0],
        )
        for kind in ("tuned", "torch")
    ]
    lines = [
        f"{profile.name}: {profile.description}",
        f"  {profile.gpu}; {profile.host}",
        *numbers,
        f"one expert of {model.name}, {expert.bytes / 2**20:.2f} MiB:",
        *[f"  {what:26} {time / 1e3:8.1f} us" for what, time in times],
    ]
    return "\n".join([*lines, f"  {crossovers(profile, model)}"])
