"""The routing of a trace, token by token, and the experts that stand in for its model's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.hardware import CostTables, Profile, Runtime, build_costs
from oled.live.kernels import SILU, ExpertForm
from oled.models.catalogue import ModelGeometry
from oled.sim.settings import Settings
from oled.trace import Trace, batch
from oled.trace.batch import lockstep
from oled.trace.schema import Geometry
from oled.trace.steps import Rows, Steps, rows_of_steps
from oled.types import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A trace's routing token by token, beside its steps. S layer-steps."""

    steps: Steps
    ids: tuple[NDArray[np.int32], ...]  # [S] of [T, k]
    weights: tuple[Floats, ...]  # [S] of [T, k]

    @classmethod
    def of(cls, trace: Trace, steps: Steps, first: int, forwards: int, rows: int = 1) -> Routing:
        """`forwards` forwards from `first` on, in replay order.

        `steps`: of the trace. `rows`: so many requests in lockstep; their tokens follow each other.
        """
        order = np.argsort(trace.forwards.request, kind="stable")
        begin, end, *_ = rows_of_steps(trace, order)
        table, ids, weights = trace.routing, [], []
        joined = batch(steps, rows)
        window = cut(joined, first, forwards)
        members = members_of(steps, joined, rows)
        lo = int(joined.step_offsets[first])
        for step in range(lo, lo + window.num_steps):
            spans = [slice(begin[s], end[s]) for s in members[step]]
            ids.append(np.concatenate([table.expert_ids[span] for span in spans]).astype(np.int32))
            weights.append(np.concatenate([table.weights[span] for span in spans]))
        return cls(window, tuple(ids), tuple(weights))


def members_of(steps: Steps, joined: Steps, rows: int) -> list[list[int]]:
    """The layer-steps of `steps` that each of `joined` (of `rows` requests in lockstep) is made of,
    those of the first request first.
    """
    if rows == 1:
        return [[step] for step in range(steps.num_steps)]
    found: list[list[int]] = []
    _, ends, members = lockstep(steps, rows)
    for forward, (lo, hi) in enumerate(itertools.pairwise(ends)):
        of_layer: dict[int, list[int]] = {}
        for member in members[lo:hi]:
            for step in range(steps.step_offsets[member], steps.step_offsets[member + 1]):
                of_layer.setdefault(int(steps.layer[step]), []).append(step)
        mine = slice(joined.step_offsets[forward], joined.step_offsets[forward + 1])
        found += [of_layer[int(layer)] for layer in joined.layer[mine]]
    return found


def _rows_between(steps: Steps, first: int, last: int) -> Rows | None:
    if steps.rows is None:
        return None
    inside = (steps.rows.forward >= first) & (steps.rows.forward < last)
    forward, tokens, context = (column[inside] for column in steps.rows)
    return Rows(forward - first, tokens, context)


def cut(steps: Steps, first: int, forwards: int) -> Steps:
    """The steps of a window of forwards, numbered from 0."""
    last = min(first + forwards, steps.num_forwards)
    if not 0 <= first < last:
        raise UserError(
            f"forwards {first} to {first + forwards - 1}: the trace has {steps.num_forwards}"
        )
    step_lo, step_hi = int(steps.step_offsets[first]), int(steps.step_offsets[last])
    lo, hi = int(steps.offsets[step_lo]), int(steps.offsets[step_hi])
    window = Steps(
        request=steps.request[first:last],
        phase=steps.phase[first:last],
        block=steps.block[first:last],
        step=steps.step[first:last],
        tokens=steps.tokens[first:last],
        context=steps.context[first:last],
        accepted=steps.accepted[first:last],
        produced=steps.produced[first:last],
        source=steps.source[first:last],
        step_offsets=steps.step_offsets[first : last + 1] - step_lo,
        forward=steps.forward[step_lo:step_hi] - first,
        layer=steps.layer[step_lo:step_hi],
        offsets=steps.offsets[step_lo : step_hi + 1] - lo,
        expert=steps.expert[lo:hi],
        count=steps.count[lo:hi],
        mass=steps.mass[lo:hi],
        last_token=steps.last_token[lo:hi],
        num_experts=steps.num_experts,
        expert_bytes=steps.expert_bytes,
        top_k=steps.top_k,
        scores=None if steps.scores is None else steps.scores[step_lo:step_hi],
        rows=_rows_between(steps, first, last),
    )
    return _with_predictions(window, steps, slice(step_lo, step_hi))


def _with_predictions(window: Steps, steps: Steps, span: slice) -> Steps:
    """Return `window` with the predictions of the layer-steps `span` of `steps`, if it has any."""
    if steps.pred_offsets is None or steps.pred_expert is None or steps.pred_score is None:
        return window
    horizons = steps.horizons
    offsets = steps.pred_offsets[span.start * horizons : span.stop * horizons + 1]
    return replace(
        window,
        pred_offsets=offsets - offsets[0],
        pred_expert=steps.pred_expert[offsets[0] : offsets[-1]],
        pred_score=steps.pred_score[offsets[0] : offsets[-1]],
        horizons=horizons,
    )


def form_of(geometry: Geometry, model: ModelGeometry | None = None) -> ExpertForm:
    """The experts of a trace's geometry, or of `model`, as gated layers without biases."""
    if geometry.expert_parts != 1:
        raise UserError("the trace holds parts of experts: they can be simulated, not run live")
    shape = geometry if model is None else model
    if shape.hidden_size is None or shape.moe_intermediate_size is None:
        raise UserError("the trace does not say how wide its experts are: they can not be built")
    return ExpertForm(shape.hidden_size, shape.moe_intermediate_size, False, False, SILU, 0.0, 0.0)


def costs_of(
    routing: Routing,
    geometry: Geometry,
    expert_bytes: int,
    settings: Settings,
    machine: tuple[Profile, Runtime],
    model: ModelGeometry | None,
) -> CostTables:
    """Return the costs of `routing` with experts of that many bytes, on a profile and a runtime.

    `model`: whose times the dense parts take; None: those of `geometry`.
    """
    steps, (profile, runtime) = routing.steps, machine
    return build_costs(
        replace(geometry, expert_bytes=(expert_bytes,) * steps.num_layers),
        steps.tokens,
        steps.context,
        int(steps.tokens.max()),
        profile,
        runtime,
        model,
        kernel=settings.cpu_kernel,
        pinned=settings.pinned,
        rows=steps.rows,
    )
