"""All costs of a replay as tables of integer nanoseconds, built once per trace and machine.

Letters: F forwards, C classes of layers (by expert bytes), G most tokens of a forward, E most
experts of a layer. What the numbers mean and where they come from: `formulas.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oled.hardware import dense as around
from oled.hardware import formulas
from oled.hardware.bound import subadditive_minorant
from oled.hardware.labels import caps, extrapolations, without_effect
from oled.hardware.profile import Profile
from oled.hardware.runtime import Runtime
from oled.hardware.shape import ExpertShape, resolve
from oled.hardware.tables import matching
from oled.models.catalogue import ModelGeometry
from oled.trace.schema import Geometry, Phase
from oled.trace.steps import Rows, Steps
from oled.types import Ints

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
    cpu_contention_ppm: int  # speed of CPU experts beside a copy, in millionths
    link_contention_ppm: int  # speed of a copy beside CPU experts
    policy_ns: int  # deciding, per layer-step
    draft_ns: Ints  # [C, G+1] the draft experts of a draft forward, by its tokens; resident
    opens: Ints  # [L] 1 where the dense part comes before: the first of its `expert_parts`
    layer_class: Ints  # [L] the C of each MoE layer
    expert_bytes: Ints  # [L]
    labels: tuple[str, ...]  # what must stand beside a result: rescaled, partial_cost, extrapolated
    provenance: Mapping[str, Any]  # profile, runtime, options, model of the costs, tables used

    def dense_of_steps(self, times: Ints, steps: Steps) -> Ints:
        """The dense part before each layer-step, from `times` of each forward: [S].

        In draft forwards the draft expert belongs to it, as the shared experts do.
        """
        dense, drafts = times[steps.forward], steps.phase[steps.forward] == Phase.DRAFT
        own = self.draft_ns[self.layer_class[steps.layer], steps.tokens[steps.forward]]
        return np.where(drafts, dense + own, dense) * self.opens[steps.layer]


def build_costs(
    geometry: Geometry,
    tokens: ArrayLike,
    context: ArrayLike,
    max_group_tokens: int,
    profile: Profile,
    runtime: Runtime,
    geometry_override: ModelGeometry | None = None,
    *,
    kernel: Kernel = "tuned",
    pinned: bool = True,
    rows: Rows | None = None,
) -> CostTables:
    """The tables for forwards of `tokens` [F] over `context` [F] cached tokens.

    In a batch `rows` says which tokens belong to one sequence and what each attends to; without,
    every forward is one.
    `geometry_override` keeps the trace's layers, experts and top-k and takes expert bytes, dense
    and head times of another model: results are labelled *rescaled*. A trace whose model is not in
    the catalogue has no dense and head times, and without the width of its experts these cost their
    bytes only: *partial_cost*. Look-ups beyond what was measured: *extrapolated*.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    context = np.asarray(context, dtype=np.int64)
    if rows is None:
        rows = Rows(np.arange(tokens.size), tokens, context)
    shapes = resolve(geometry, geometry_override)
    most_tokens = max(max_group_tokens, int(tokens.max(initial=1)))
    most_experts = max(geometry.experts_per_layer)
    tuned = kernel == "tuned"

    dense, head = np.zeros_like(tokens), np.zeros_like(tokens)
    if shapes.model is not None:
        params = shapes.model.moe_layer_params
        dense = _integer(around.dense_layer(profile, shapes.model, params, tokens, rows))
        head = _integer(around.head(profile, shapes.model, tokens, rows))
    gpu_kernel = np.stack(
        [_gpu_group(profile, expert, most_tokens, most_experts) for expert in shapes.experts]
    )
    calls = [
        np.rint(expert.share * runtime.per_active_expert_ns * np.arange(most_experts + 1))
        for expert in shapes.experts
    ]
    gpu = np.maximum(gpu_kernel, np.array(calls, dtype=np.int64)[:, None, :])
    both = min(
        int(1e6 * formulas.contention(profile, expert.stored_bytes, tuned, pinned))
        for expert in shapes.experts
    )
    size = shapes.activation_bytes * np.arange(most_tokens + 1)
    return CostTables(
        head_ns=head,
        dense_ns=dense + runtime.per_layer_ns,
        dense_kernel_ns=dense,
        gpu_ns=gpu,
        gpu_kernel_ns=gpu_kernel,
        gpu_bound_ns=_bound(profile, shapes.experts, gpu),
        cpu_ns=np.stack([cpu_expert_ns(profile, e, most_tokens, tuned) for e in shapes.experts]),
        cpu_call_ns=round(profile.cpu_call.base),
        act_out_ns=_crossing(formulas.crossing(profile, size, inward=False)),
        act_back_ns=_crossing(formulas.crossing(profile, size, inward=True)),
        copy_ns=_integer([formulas.copy(profile, e.stored_bytes, pinned) for e in shapes.experts]),
        copy_wake_ns=round(formulas.copy_wake(profile, pinned)),
        copy_out_ns=_integer(
            [formulas.copy(profile, e.stored_bytes, pinned, inward=False) for e in shapes.experts]
        ),
        cpu_contention_ppm=both,
        link_contention_ppm=both,
        draft_ns=np.stack(
            [_draft_ns(profile, e, geometry.draft_experts, most_tokens) for e in shapes.experts]
        ),
        policy_ns=runtime.policy_ns_per_layer // geometry.expert_parts,
        opens=_integer(np.arange(len(geometry.moe_layers)) % geometry.expert_parts == 0),
        layer_class=np.array(shapes.layer_class, dtype=np.int64),
        expert_bytes=np.array(
            [shapes.experts[c].stored_bytes for c in shapes.layer_class], dtype=np.int64
        ),
        labels=(
            *shapes.labels,
            *extrapolations(
                profile,
                shapes,
                int((rows.tokens + rows.context).max(initial=0)),
                most_tokens,
                most_experts,
            ),
            *caps(profile, tuned, pinned),
            *without_effect(profile, shapes, tuned, pinned),
        ),
        provenance={
            "profile": profile.name,
            "runtime": runtime.name,
            "cpu_kernel": kernel,
            "pinned": pinned,
            "cost_model": shapes.name,
            "measured_tables": [
                table.source
                for expert in shapes.experts
                for table in (
                    matching(profile.gpu_tables, expert.bytes, expert.top_k),
                    matching(profile.cpu_tables, expert.bytes, expert.top_k) if tuned else None,
                )
                if table is not None
            ],
            "numbers": {
                name: f"{q.value:g} {q.unit}, {q.tag}" for name, q in profile.quantities().items()
            },
        },
    )


def _integer(times: ArrayLike) -> Ints:
    return np.ascontiguousarray(np.rint(times).astype(np.int64))


def _gpu_group(profile: Profile, expert: ExpertShape, tokens: int, experts: int) -> Ints:
    """[G+1, E+1]. Rounded up, which keeps sub-additivity; no experts, no launch."""

    def formula(tokens: Ints, active: Ints) -> NDArray[np.float64]:
        return formulas.gpu_group(profile, expert, tokens, active)

    table = matching(profile.gpu_tables, expert.bytes, expert.top_k)
    if table is None:
        times = formula(np.arange(tokens + 1), np.arange(experts + 1))
    else:
        times = table.lookup(formula, tokens, experts)
    group = np.ceil(expert.share * times).astype(np.int64)
    group[:, 0] = 0
    return group


def _draft_ns(profile: Profile, expert: ExpertShape, units: int, tokens: int) -> Ints:
    """[G+1]. One expert of `units` times the bytes and arithmetic, for all tokens, one launch."""
    if units == 0:
        return np.zeros(tokens + 1, dtype=np.int64)
    wide = ExpertShape(units * expert.bytes, units * expert.flops, top_k=1)
    times = formulas.gpu_group(profile, wide, np.arange(tokens + 1), np.array([1]))[:, 0]
    return _integer(expert.share * times)


def _bound(profile: Profile, experts: tuple[ExpertShape, ...], gpu: Ints) -> Ints:
    """[C, G+1, E+1]. The formula is sub-additive as it is; measured tables need not be."""
    floors = [
        subadditive_minorant(table, expert.top_k)
        if matching(profile.gpu_tables, expert.bytes, expert.top_k)
        else table
        for table, expert in zip(gpu, experts, strict=True)
    ]
    return np.stack(floors)


def cpu_expert_ns(profile: Profile, expert: ExpertShape, tokens: int, tuned: bool) -> Ints:
    """One CPU expert for 0 to `tokens` tokens, [G+1]. Measured tables are of the tuned kernel."""

    def formula(tokens: Ints, active: Ints) -> NDArray[np.float64]:
        return np.outer(
            formulas.cpu_expert(profile, expert, tokens, tuned), np.ones(active.shape[0])
        )

    table = matching(profile.cpu_tables, expert.bytes, expert.top_k) if tuned else None
    if table is None:
        times = formulas.cpu_expert(profile, expert, np.arange(tokens + 1), tuned)
    else:
        times = table.lookup(formula, tokens, 1)[:, 1]
        stream = expert.bytes / profile.cpu_stream.base * 1e9
        times = np.maximum(times, np.where(np.arange(tokens + 1) > 0, stream, 0.0))
    return _integer(expert.share * times)


def _crossing(times: NDArray[np.float64]) -> Ints:
    """[G+1]. No tokens, no crossing."""
    crossing = _integer(times)
    crossing[0] = 0
    return crossing
