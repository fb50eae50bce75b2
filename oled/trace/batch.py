"""Several recorded requests as one batch, in lockstep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.schema import Phase
from oled.trace.steps import Rows, Steps
from oled.types import Floats, Ints


def batch(steps: Steps, n: int) -> Steps:
    """Join the requests n by n: forward i of each with forward i of the others.

    Prefill forwards meet prefill forwards, the rest (denoise, commit, decode, …) meets the rest in
    order; a row that ends early leaves. A joined forward has the union of the active experts, the
    summed counts, masses, tokens, accepted and produced tokens, the summed context, and the
    smallest phase of its rows (it denoises while any row denoises); block, step and source are
    those of its first row. `rows` keeps each sequence's own tokens and context: a token attends to
    no other sequence. The request is the number of
    the group.
    """
    from oled.trace import kernels

    if n < 1:
        raise TraceError(f"batch size {n}: it must be at least 1")
    if n == 1:
        return steps
    group, ends, members = lockstep(steps, n)
    starts = ends[:-1]
    first = members[starts]
    num_steps, num_entries = len(steps.layer), len(steps.expert)
    merged = np.empty(num_steps, dtype=np.int64)
    step_offsets = np.empty(len(first) + 1, dtype=np.int64)
    layer = np.empty(num_steps, dtype=np.int64)
    offsets = np.empty(num_steps + 1, dtype=np.int64)
    expert = np.empty(num_entries, dtype=np.uint16)
    count = np.empty(num_entries, dtype=np.int32)
    mass = np.empty((num_entries, steps.mass.shape[1]), dtype=np.float32)
    last_token = np.empty(num_entries, dtype=np.int32)
    num_steps, num_entries = kernels.merge_steps(
        ends,
        members,
        steps.step_offsets,
        steps.layer,
        steps.offsets,
        steps.expert,
        steps.count,
        steps.mass,
        steps.last_token,
        steps.num_experts,
        merged,
        step_offsets,
        layer,
        offsets,
        expert,
        count,
        mass,
        last_token,
        steps.step_offsets[:-1].copy(),
        *kernels.scratch_of(steps.num_experts),
    )
    result = replace(
        steps,
        request=group,
        phase=np.minimum.reduceat(steps.phase[members], starts),
        block=steps.block[first],
        step=steps.step[first],
        tokens=np.add.reduceat(steps.tokens[members], starts),
        context=np.add.reduceat(steps.context[members], starts),
        accepted=np.add.reduceat(steps.accepted[members], starts),
        produced=np.add.reduceat(steps.produced[members], starts),
        source=steps.source[first],
        step_offsets=step_offsets,
        forward=np.repeat(np.arange(len(first)), np.diff(step_offsets)),
        layer=layer[:num_steps],
        offsets=offsets[: num_steps + 1],
        expert=expert[:num_entries],
        count=count[:num_entries],
        mass=mass[:num_entries],
        last_token=last_token[:num_entries],
        rows=Rows(
            np.repeat(np.arange(len(first)), np.diff(ends)),
            steps.tokens[members],
            steps.context[members],
        ),
    )
    if steps.scores is not None:
        result = replace(result, scores=_merged_scores(steps, steps.scores, merged, num_steps))
    if steps.pred_offsets is not None:
        result = _with_merged_predictions(result, steps, merged)
    return result


def lockstep(steps: Steps, n: int) -> tuple[Ints, Ints, Ints]:
    """Return the group of each joined forward [G], ends of its members [G+1], and the members.

    Members are forwards of `steps`, those of a joined one in the order of their requests.
    """
    _, row = np.unique(steps.request, return_inverse=True)
    later = (steps.phase != Phase.PREFILL).astype(np.int64)
    lane = row * 2 + later  # forwards that follow each other in one request and class
    by_lane = np.argsort(lane, kind="stable")
    sorted_lane = lane[by_lane]
    turn = np.empty_like(lane)
    turn[by_lane] = np.arange(len(lane)) - np.searchsorted(sorted_lane, sorted_lane)
    group = row // n
    members = np.lexsort((row, turn, later, group))
    keys = np.stack([group[members], later[members], turn[members]])
    starts = np.flatnonzero(np.append(True, (np.diff(keys, axis=1) != 0).any(axis=0)))
    ends = np.append(starts, len(members))
    return group[members[starts]].astype(np.int64), ends.astype(np.int64), members.astype(np.int64)


def _merged_scores(steps: Steps, scores: Floats, merged: Ints, num_steps: int) -> Floats:
    """Return means over the tokens of all rows, from each row's mean: f32[steps', E]."""
    tokens = steps.tokens[steps.forward].astype(np.float64)
    total = np.zeros((num_steps, scores.shape[1]))
    np.add.at(total, merged, scores * tokens[:, None])
    weight = np.bincount(merged, weights=tokens, minlength=num_steps)
    return (total / np.maximum(weight, 1.0)[:, None]).astype(np.float32)


def _with_merged_predictions(result: Steps, steps: Steps, merged: Ints) -> Steps:
    """Add up the predicted weights of all rows by expert, most wanted first."""
    if steps.pred_offsets is None or steps.pred_expert is None or steps.pred_score is None:
        return result
    horizons = steps.horizons
    step, ahead = np.divmod(np.arange(len(steps.pred_offsets) - 1), max(horizons, 1))
    row = np.repeat(merged[step] * horizons + ahead, np.diff(steps.pred_offsets))
    widest = int(steps.num_experts.max())
    key, place = np.unique(row * widest + steps.pred_expert, return_inverse=True)
    with np.errstate(over="ignore"):  # scores beyond float32 are infinite: still the most wanted
        score = np.bincount(place, weights=steps.pred_score).astype(np.float32)
    row, expert = np.divmod(key, widest)
    order = np.lexsort((expert, -score, row))
    offsets = np.searchsorted(row, np.arange(len(result.layer) * horizons + 1))
    return replace(
        result,
        pred_offsets=offsets.astype(np.int64),
        pred_expert=expert[order].astype(np.uint16),
        pred_score=score[order],
    )
