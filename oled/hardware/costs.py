"""All costs of a replay as tables of integer nanoseconds, built once per trace and machine.

Letters: F forwards, C classes of layers (by expert bytes), G most tokens of a forward, E most
experts of a layer. What the numbers mean and where they come from: `formulas.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oled.hardware import formulas
from oled.hardware.bound import subadditive_minorant
from oled.hardware.profile import Profile
from oled.hardware.runtime import Runtime
from oled.hardware.shape import DenseShape, ExpertShape, ModelShape, Shapes, resolve
from oled.hardware.tables import MeasuredTable
from oled.trace.schema import Geometry

Ints = NDArray[np.int64]
Kernel = Literal["tuned", "torch"]


@dataclass(frozen=True, slots=True, eq=False)
class CostTables:
    """Look-up tables of int64 nanoseconds, all >= 0 and contiguous."""

    head_ns: Ints  # [F] GPU work outside the MoE layers; no runtime overhead
    dense_ns: Ints  # [F] per MoE layer: attention, router, shared expert, runtime overhead
    dense_kernel_ns: Ints  # [F] the same without runtime
    gpu_ns: Ints  # [C, G+1, E+1] one launch group, by tokens = ceil(pairs / k) and active experts
    gpu_kernel_ns: Ints  # [C, G+1, E+1] the same without runtime
    gpu_bound_ns: Ints  # [C, G+1, E+1] <= gpu_ns and sub-additive, for lower bounds
    cpu_ns: Ints  # [C, G+1] one expert by its tokens, without cpu_call_ns
    cpu_call_ns: int  # once per batch of CPU experts
    act_out_ns: Ints  # [G+1] activations of so many tokens to the host
    act_back_ns: Ints  # [G+1] and the results back
    copy_ns: Ints  # [C] one expert to the GPU, queued behind another
    copy_wake_ns: int  # on top where the link was idle
    copy_out_ns: Ints  # [C] one expert back to the host
    contention_ppm: int  # speed of CPU experts and of copies while both run, in millionths
    policy_ns: int  # deciding, per layer-step
    layer_class: Ints  # [L] the C of each MoE layer
    expert_bytes: Ints  # [L]
    labels: tuple[str, ...]  # what must stand beside a result: rescaled, partial_cost, extrapolated
    provenance: Mapping[str, Any]  # profile, runtime, options, model of the costs


def build_costs(
    geometry: Geometry,
    tokens: Ints,
    context: Ints,
    max_group_tokens: int,
    profile: Profile,
    runtime: Runtime,
    geometry_override: ModelShape | None = None,
    *,
    kernel: Kernel = "tuned",
    pinned: bool = True,
) -> CostTables:
    """The tables for forwards of `tokens` [F] over `context` [F] cached tokens.

    `geometry_override` keeps the trace's layers, experts and top-k and takes expert bytes, dense
    and head times of another model: results are labelled *rescaled*. A trace whose model is not in
    the catalogue has no dense and head cost, and without a hidden size experts cost their bytes
    only: *partial_cost*. Look-ups beyond what was measured: *extrapolated*.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    context = np.asarray(context, dtype=np.int64)
    shapes = resolve(geometry, None, geometry_override)
    most_tokens = max(max_group_tokens, int(tokens.max(initial=1)))
    most_experts = max(geometry.experts_per_layer)
    tuned = kernel == "tuned"

    groups = [_gpu_group(profile, e, most_tokens, most_experts) for e in shapes.experts]
    gpu_kernel = np.stack(groups)
    launches = runtime.per_active_expert_ns * np.arange(most_experts + 1)
    gpu = np.maximum(gpu_kernel, launches)
    measured = [_table(profile.gpu_tables, expert) is not None for expert in shapes.experts]
    bound = np.stack(
        [
            subadditive_minorant(table, expert.top_k) if is_measured else table
            for table, expert, is_measured in zip(gpu, shapes.experts, measured, strict=True)
        ]
    )
    dense_kernel, head = _dense(profile, shapes.dense, tokens, context)
    copy, wake, copy_out = _copies(profile, shapes.experts, pinned)
    activation_bytes = shapes.activation_bytes * np.arange(most_tokens + 1)
    return CostTables(
        head_ns=head,
        dense_ns=dense_kernel + runtime.per_layer_ns,
        dense_kernel_ns=dense_kernel,
        gpu_ns=gpu,
        gpu_kernel_ns=gpu_kernel,
        gpu_bound_ns=bound,
        cpu_ns=np.stack([_cpu_expert(profile, e, most_tokens, tuned) for e in shapes.experts]),
        cpu_call_ns=round(profile.cpu_call.base),
        act_out_ns=_crossing(profile, activation_bytes, profile.d2h_pinned.base),
        act_back_ns=_crossing(profile, activation_bytes, profile.h2d_pinned.base),
        copy_ns=copy,
        copy_wake_ns=wake,
        copy_out_ns=copy_out,
        contention_ppm=int(1e6 * formulas.contention(profile, tuned, pinned)),
        policy_ns=runtime.policy_ns_per_layer,
        layer_class=np.array(shapes.layer_class, dtype=np.int64),
        expert_bytes=np.array([shapes.experts[c].bytes for c in shapes.layer_class], np.int64),
        labels=(
            *shapes.labels,
            *_extrapolations(profile, shapes, context, most_tokens, most_experts, tuned),
        ),
        provenance={
            "profile": profile.name,
            "runtime": runtime.name,
            "cpu_kernel": kernel,
            "pinned": pinned,
            "cost_model": shapes.model,
            "numbers": {
                name: f"{q.value:g} {q.unit} ({q.tag})" for name, q in profile.quantities().items()
            },
        },
    )


def _integer(times: NDArray[np.float64]) -> Ints:
    return np.ascontiguousarray(np.rint(times).astype(np.int64))


def _table(tables: tuple[MeasuredTable, ...], expert: ExpertShape) -> MeasuredTable | None:
    """The table measured with this shape of expert."""
    fitting = (t for t in tables if (t.expert_bytes, t.top_k) == (expert.bytes, expert.top_k))
    return next(fitting, None)


def _gpu_group(profile: Profile, expert: ExpertShape, tokens: int, experts: int) -> Ints:
    """[G+1, E+1]. Rounded up part by part, which keeps sub-additivity; a launch takes >= 1 ns."""
    launch = max(1, round(profile.moe_t0.base))
    table = _table(profile.gpu_tables, expert)
    if table is None:
        n, t = np.arange(experts + 1), np.arange(tokens + 1)
        times = launch + np.ceil(formulas.gpu_group(profile, expert, t, n)).astype(np.int64)
    else:
        times = np.ceil(table.lookup(tokens, experts, launch)).astype(np.int64)
    times[:, 0] = 0
    return times


def _cpu_expert(profile: Profile, expert: ExpertShape, tokens: int, tuned: bool) -> Ints:
    """[G+1]. Measured tables are of the tuned kernel."""
    table = _table(profile.cpu_tables, expert) if tuned else None
    if table is None:
        return _integer(formulas.cpu_expert(profile, expert, np.arange(tokens + 1), tuned))
    return np.ascontiguousarray(_integer(table.lookup(tokens, 1, 0.0))[:, 1])


def _dense(
    profile: Profile, dense: DenseShape | None, tokens: Ints, context: Ints
) -> tuple[Ints, Ints]:
    """Per MoE layer, and head, of each forward [F]; zeros where the model is not known."""
    if dense is None:
        return np.zeros_like(tokens), np.zeros_like(tokens)
    layer = formulas.dense_layer(profile, dense, dense.layer_params, tokens, context)
    return _integer(layer), _integer(formulas.head(profile, dense, tokens, context))


def _copies(
    profile: Profile, experts: tuple[ExpertShape, ...], pinned: bool
) -> tuple[Ints, int, Ints]:
    """Queued copy [C], what an idle link adds, and the way back [C].

    An expert is one contiguous copy. A pageable copy blocks its caller, so none is ever queued.
    No copy takes less than its host call.
    """
    size = np.array([expert.bytes for expert in experts], dtype=np.float64)
    if pinned:
        latency, wake = (
            profile.copy_queued.base,
            profile.copy_isolated.base - profile.copy_queued.base,
        )
        rates = (profile.h2d_pinned.base, profile.d2h_pinned.base)
    else:
        latency, wake = profile.copy_isolated.base + profile.copy_pageable.base, 0.0
        rates = (profile.h2d_pageable.base, profile.d2h_pageable.base)
    call = profile.memcpy_host_call.base
    into, out = (_integer(np.maximum(call, latency + size / rate * 1e9)) for rate in rates)
    return into, max(0, round(wake)), out


def _crossing(profile: Profile, size: Ints, rate: float) -> Ints:
    """Half of the fixed round trip, and the bytes at the pinned rate; no tokens, no crossing."""
    times = profile.act_roundtrip.base / 2 + size / rate * 1e9
    times[0] = 0.0
    return _integer(times)


def _extrapolations(
    profile: Profile, shapes: Shapes, context: Ints, tokens: int, experts: int, tuned: bool
) -> list[str]:
    """Labels for what lies outside the measured ranges, with the ranges."""
    found: dict[str, None] = {}
    for expert in shapes.experts:
        gpu, cpu = _table(profile.gpu_tables, expert), _table(profile.cpu_tables, expert)
        if gpu is not None:
            found |= dict.fromkeys(f"GPU table: {t}" for t in gpu.outside(tokens, experts))
        elif tokens > formulas.GROUP_TOKENS:
            found[f"GPU groups: up to {formulas.GROUP_TOKENS} tokens, {tokens} needed"] = None
        if cpu is not None and tuned:
            found |= dict.fromkeys(f"CPU table: {t}" for t in cpu.outside(tokens, 1))
    keys = int(context.max(initial=0)) + tokens
    if shapes.dense is not None and keys > formulas.ATTENTION_KEYS:
        found[f"attention: up to {formulas.ATTENTION_KEYS} keys, {keys} needed"] = None
    return [f"extrapolated: {text}" for text in found]
