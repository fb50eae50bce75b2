"""A profile in words: its numbers, and what they mean for one model."""

from __future__ import annotations

import numpy as np

from oled.hardware import formulas
from oled.hardware.profile import Profile
from oled.hardware.shape import ExpertShape
from oled.models.catalogue import ModelGeometry

_MOST_TOKENS = 4096


def crossover(profile: Profile, expert: ExpertShape, tuned: bool, pinned: bool = True) -> int:
    """The most tokens for which one CPU expert, with its call, beats one copy in a full queue.

    0 where the copy always wins, 4096 where the CPU still wins there.
    """
    tokens = np.arange(1, _MOST_TOKENS + 1)
    cpu = formulas.cpu_expert(profile, expert, tokens, tuned) + profile.cpu_call.base
    return int(np.count_nonzero(cpu < formulas.copy(profile, expert.bytes, pinned)))


def describe(profile: Profile, model: ModelGeometry) -> str:
    """Lines for a terminal: each number with spread, tag and source, then times of one expert."""
    numbers = [
        f"  {name:21} {f'{q.value:g} {q.unit}':>12}  {f'{q.low:g}-{q.high:g}':>13}  "
        f"{q.tag:9} {q.source}"
        for name, q in profile.quantities().items()
    ]
    expert = ExpertShape.of(model, model.top_k)
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
        f"one expert of {model.name}, {expert.bytes / 2**20:.1f} MiB:",
        *[f"  {what:26} {time / 1e3:8.1f} us" for what, time in times],
    ]
    for kind in ("tuned", "torch"):
        tokens = crossover(profile, expert, kind == "tuned")
        verdict = f"up to {tokens} tokens an expert" if tokens else "never"
        lines.append(f"  the {kind} CPU kernel beats a pinned copy: {verdict}")
    return "\n".join(lines)
