"""What a replay needs beyond what was measured: the labels that its result must carry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from oled.hardware import dense, formulas
from oled.hardware.profile import DTYPE_BYTES, Profile
from oled.hardware.shape import ExpertShape, Shapes
from oled.hardware.tables import MeasuredTable, matching
from oled.trace.steps import Rows


def extrapolations(
    profile: Profile, shapes: Shapes, keys: int, tokens: int, experts: int
) -> list[str]:
    """Labels with the measured range and what is needed, each once.

    Args: keys, tokens, experts: the most that a forward attends to, routes, and finds in a layer.
    """
    found: list[str] = []
    width = DTYPE_BYTES[profile.dtype]
    for expert in shapes.experts:
        if expert.flops and abs(2 * expert.bytes / (width * expert.flops) - 1) > 0.01:
            found.append(
                f"rates were measured with {profile.dtype}, experts have "
                f"{2 * expert.bytes / expert.flops:.2f} bytes a weight"
            )
        gpu = matching(profile.gpu_tables, expert.bytes, expert.top_k)
        cpu = matching(profile.cpu_tables, expert.bytes, expert.top_k)
        found += _other_shapes(profile.gpu_tables, "GPU", expert, gpu)
        found += _other_shapes(profile.cpu_tables, "CPU", expert, cpu)
        if gpu is not None:
            found += [f"GPU table, {text}" for text in gpu.outside(tokens, experts)]
        elif tokens > formulas.GROUP_TOKENS:
            found.append(_range("GPU groups, tokens", 1, formulas.GROUP_TOKENS, tokens))
        if cpu is not None:
            found += [f"CPU table, {text}" for text in cpu.outside(tokens, 1)]
    if shapes.model is not None:
        if keys > dense.ATTENTION_KEYS:
            found.append(_range("attention, keys", 1, dense.ATTENTION_KEYS, keys))
        params = shapes.model.moe_layer_params
        low, high = dense.DENSE_PARAMS
        if not low <= params <= high:
            found.append(_range("dense layers, weights", low, high, params))
    return [f"extrapolated: {text}" for text in dict.fromkeys(found)]


def _other_shapes(
    tables: tuple[MeasuredTable, ...],
    what: str,
    expert: ExpertShape,
    fitting: MeasuredTable | None,
) -> list[str]:
    """Where a profile has tables, and none of this expert: its formula is of other ones."""
    if not tables or fitting is not None:
        return []
    known = ", ".join(f"{t.expert_bytes:,} bytes{_top(t.top_k)}" for t in tables)
    return [
        f"{what} table: experts of {known} were measured, "
        f"{expert.bytes:,} bytes{_top(expert.top_k)} needed"
    ]


def _top(top_k: int | None) -> str:
    return "" if top_k is None else f" and top-{top_k}"


def caps(profile: Profile, tuned: bool, pinned: bool) -> list[str]:
    """Labels where memory delivers less than a number of the profile says."""
    ways = [formulas.link_of(profile, pinned, inward) for inward in (True, False)]
    names = [f"{way}_{'pinned' if pinned else 'pageable'}" for way in ("h2d", "d2h")]
    limits = [
        (name, own, profile.cpu_stream.base / passes, "host memory delivers (cpu_stream)")
        for name, (own, passes) in zip(names, ways, strict=True)
    ]
    kernel = "cpu_expert_tuned" if tuned else "cpu_expert_torch"
    own = profile.cpu_expert_tuned if tuned else profile.cpu_expert_torch
    limits.append((kernel, own, profile.cpu_stream.base, "host memory delivers (cpu_stream)"))
    limits.append(
        ("moe_eff", profile.moe_eff, profile.gpu_mem.base, "the GPU's memory delivers (gpu_mem)")
    )
    return [
        f"capped: {name} is {own.base / 1e9:g} GB/s, {what} {limit / 1e9:g} GB/s, which counts"
        for name, own, limit, what in limits
        if own.base > limit
    ]


_INSTEAD = {
    "cpu_stream": "neither copies nor experts on the CPU are limited by it; what limits these is "
    "cpu_expert_tuned (or cpu_expert_torch), what limits copies h2d_pinned",
    "gpu_mem": "experts are read at moe_eff, which is less",
    "dram_share": "CPU experts and copies together ask for less",
    "pageable_dram_passes": "it counts for cost.pinned=false where memory is the limit",
    "copy_pageable": "it counts for cost.pinned=false",
    "h2d_pageable": "it counts for cost.pinned=false",
    "d2h_pageable": "it counts for cost.pinned=false and experts that are written back",
    "cpu_expert_torch": "it counts for cost.cpu_kernel=torch",
    "cpu_gemm_torch": "it counts for cost.cpu_kernel=torch",
    "cpu_expert_tuned": "it counts for cost.cpu_kernel=tuned",
    "cpu_gemm_tuned": "it counts for cost.cpu_kernel=tuned",
}
"""Of a number that changed nothing: what does."""
_BY_USER = "set by the user"


def without_effect(profile: Profile, shapes: Shapes, tuned: bool, pinned: bool) -> list[str]:
    """Labels for numbers of the user that are not the limit of anything here, or not read."""
    now = _sample(profile, shapes, tuned, pinned)
    found = []
    for name, quantity in profile.quantities().items():
        if quantity.source != _BY_USER:
            continue
        near = [profile.scaled(name, factor) for factor in (0.99, 1.01)]
        if all(_sample(other, shapes, tuned, pinned) == now for other in near):
            what = _INSTEAD.get(name, "another number is the limit")
            found.append(
                f"no effect: hardware.{name} = {quantity.value:g} {quantity.unit} changes nothing "
                f"here: {what}"
            )
    return found


_SAMPLE_TOKENS = np.array([1, 16, 64, 512, 2048])


def _sample(profile: Profile, shapes: Shapes, tuned: bool, pinned: bool) -> list[Any]:
    """Some of every kind of cost: equal lists, equal tables."""
    values: list[Any] = [profile.cpu_call.base, formulas.copy_wake(profile, pinned)]
    for inward in (True, False):
        size = shapes.activation_bytes * _SAMPLE_TOKENS
        values += formulas.crossing(profile, size, inward).tolist()
    rows = Rows(np.arange(5), _SAMPLE_TOKENS, 100 * _SAMPLE_TOKENS)
    if shapes.model is not None:
        values += dense.head(profile, shapes.model, _SAMPLE_TOKENS, rows).tolist()
        params = shapes.model.moe_layer_params
        values += dense.dense_layer(profile, shapes.model, params, _SAMPLE_TOKENS, rows).tolist()
    for e in shapes.experts:
        values += formulas.gpu_group(profile, e, _SAMPLE_TOKENS, np.array([1, 8])).ravel().tolist()
        values += formulas.cpu_expert(profile, e, _SAMPLE_TOKENS, tuned).tolist()
        values += [formulas.copy(profile, e.stored_bytes, pinned, way) for way in (True, False)]
        values.append(formulas.contention(profile, e.stored_bytes, tuned, pinned))
    return values


_ADVICE = (
    (
        ("partial_cost", "extrapolated: dense layers"),
        "add cost.geometry=NAME (oled list models) for bytes and times of a published model",
    ),
    (
        ("extrapolated: GPU", "extrapolated: CPU", "extrapolated: attention"),
        "measure your machine with oled profile out=FILE.yaml and add hardware=FILE.yaml",
    ),
)


def advice(labels: Iterable[str]) -> list[str]:
    """Return what to add to a run so that its labels go, each piece once."""
    given = tuple(labels)
    return [text for starts, text in _ADVICE if any(label.startswith(starts) for label in given)]


def foreign(profile: Profile, device: str) -> list[str]:
    """A label where the profile was not measured on `device`, on which it is compared."""
    if profile.device == device:
        return []
    origin = f"was measured on {profile.device}" if profile.device else "was not measured as one"
    return [f"foreign profile: {profile.name} {origin}, this is {device}"]


def _range(what: str, low: int, high: int, needed: int) -> str:
    return f"{what}: {low} to {high} were measured, {needed} needed"
