"""Steps of batches, and the side tables that lie beside steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small import diffusion, geometry, manifest, record

from oled.trace import (
    ForwardRecord,
    Phase,
    Prediction,
    RouterScores,
    Steps,
    TraceError,
    batch,
    build_steps,
    trace_of_records,
)
from oled.trace.steps import coming_scores

SHAPE = geometry()


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_batch_is_the_union_of_its_rows(n: int) -> None:
    steps = build_steps(trace_of_records(manifest(SHAPE), diffusion(SHAPE, requests=5)))
    merged = batch(steps, n)
    joined = _joined(steps, n)
    assert merged.num_forwards == len(joined)
    for g, rows in enumerate(joined):
        assert merged.request[g] == steps.request[rows[0]] // n
        assert merged.phase[g] == min(steps.phase[rows])
        for name in ("tokens", "context", "accepted", "produced"):
            assert getattr(merged, name)[g] == getattr(steps, name)[rows].sum()
        for s in range(merged.step_offsets[g], merged.step_offsets[g + 1]):
            assert merged.forward[s] == g
            _assert_union(merged, steps, s, rows)
    assert merged.count.sum() == steps.count.sum()
    assert merged.offsets[-1] == len(merged.expert)


def _joined(steps: Steps, n: int) -> list[list[int]]:
    result = []
    requests = sorted(set(steps.request.tolist()))
    for start in range(0, len(requests), n):
        for prefill in (True, False):
            lanes = [
                [
                    f
                    for f in range(steps.num_forwards)
                    if steps.request[f] == r and (steps.phase[f] == Phase.PREFILL) == prefill
                ]
                for r in requests[start : start + n]
            ]
            for turn in range(max(map(len, lanes))):
                result.append([lane[turn] for lane in lanes if turn < len(lane)])
    return result


def _assert_union(merged: Steps, steps: Steps, s: int, rows: list[int]) -> None:
    entries: dict[int, Any] = {}
    order = []
    for row in rows:
        for t in range(steps.step_offsets[row], steps.step_offsets[row + 1]):
            if steps.layer[t] == merged.layer[s]:
                for i in range(steps.offsets[t], steps.offsets[t + 1]):
                    count, mass = entries.get(int(steps.expert[i]), (0, 0.0))
                    entries[int(steps.expert[i])] = (count + steps.count[i], mass + steps.mass[i])
                    order.append((row, steps.last_token[i], int(steps.expert[i])))
    here = slice(merged.offsets[s], merged.offsets[s + 1])
    assert merged.expert[here].tolist() == sorted(entries)
    for i, e in enumerate(sorted(entries), merged.offsets[s]):
        assert merged.count[i] == entries[e][0]
        np.testing.assert_allclose(merged.mass[i], entries[e][1], rtol=1e-6)
    latest = {e: place for place, (_, _, e) in enumerate(sorted(order))}
    by_recency = merged.expert[here][np.argsort(merged.last_token[here])]
    assert by_recency.tolist() == sorted(latest, key=lambda e: latest[e])


def test_a_batch_of_one_is_the_steps_themselves() -> None:
    steps = build_steps(trace_of_records(manifest(SHAPE), diffusion(SHAPE)))
    assert batch(steps, 1) is steps
    with pytest.raises(TraceError, match="batch size 0"):
        batch(steps, 0)


# --- side tables ----------------------------------------------------------------------------------


def _with_side_tables() -> tuple[list[ForwardRecord], Steps]:
    rng = np.random.default_rng(3)
    records = []
    for one in diffusion(SHAPE, requests=2, interleaved=True):
        values = rng.random((3, len(one.positions), 8)).astype(np.float32)
        ids = np.broadcast_to(np.arange(8), values.shape)
        said = tuple(
            Prediction("gate", layer, layer + h, rng.permutation(8)[:3], np.array([3.0, 2.0, 1.0]))
            for layer in (1, 2, 3)
            for h in (1, 2)
            if layer + h <= 3
        )
        records.append(replace(one, scores=RouterScores(ids, values), predictions=said))
    return records, build_steps(trace_of_records(manifest(SHAPE), records))


def test_scores_are_means_over_tokens() -> None:
    records, steps = _with_side_tables()
    assert steps.scores is not None
    for s in range(steps.num_steps):
        one = records[steps.source[steps.forward[s]]]
        assert one.scores is not None
        expected = one.scores.values[steps.layer[s]].mean(axis=0)
        np.testing.assert_allclose(steps.scores[s], expected, rtol=1e-6)


def test_predictions_lie_at_step_and_horizon() -> None:
    records, steps = _with_side_tables()
    assert steps.horizons == 2
    assert steps.pred_offsets is not None
    assert steps.pred_expert is not None
    assert len(steps.pred_offsets) == steps.num_steps * 2 + 1
    for s in range(steps.num_steps):
        one = records[steps.source[steps.forward[s]]]
        for h in (1, 2):
            row = s * 2 + h - 1
            found = steps.pred_expert[steps.pred_offsets[row] : steps.pred_offsets[row + 1]]
            here = steps.layer[s] + 1
            said = [p for p in one.predictions if p.layer == here and p.target == here + h]
            expected = said[0].expert_ids.tolist() if said else []
            assert found.tolist() == expected


def test_a_batch_merges_side_tables() -> None:
    _, steps = _with_side_tables()
    merged = batch(steps, 2)
    assert merged.scores is not None
    assert steps.scores is not None
    assert steps.pred_score is not None
    assert merged.pred_score is not None
    assert merged.pred_offsets is not None
    assert merged.pred_score.sum() == steps.pred_score.sum()
    assert len(merged.pred_offsets) == merged.num_steps * 2 + 1
    for row in range(merged.num_steps * 2):
        scores = merged.pred_score[merged.pred_offsets[row] : merged.pred_offsets[row + 1]]
        assert (np.diff(scores) <= 0).all()
    both = [np.flatnonzero(steps.layer == 0)[f] for f in (0, _first_of_second(steps))]
    np.testing.assert_allclose(merged.scores[0], steps.scores[both].mean(axis=0), rtol=1e-6)


def _first_of_second(steps: Steps) -> int:
    return int(np.argmax(steps.request == 1))


def test_an_unknown_predictor_is_refused() -> None:
    records, _ = _with_side_tables()
    with pytest.raises(TraceError, match="no predictions by 'oracle'; recorded: gate"):
        build_steps(trace_of_records(manifest(SHAPE), records), predictor="oracle")


# --- predictions of the next forward --------------------------------------------------------------


def test_a_target_that_does_not_lie_ahead_is_meant_in_the_next_forward() -> None:
    """Layers 1 and 2, two tokens: what layer 2 said of layer 1 is one layer-step on, of itself two.

    `coming_scores` takes the latter as a mean over the tokens, and nothing else.
    """
    ids = np.array([[[1, 2], [1, 3]]] * 2)

    def said(layer: int, target: int, score: float) -> Prediction:
        return Prediction("heads", layer, target, np.array([3, 1]), np.array([score, 0.5]))

    one = record(
        ids,
        predictions=(said(1, 2, 4.0), said(1, 1, 1.0), said(2, 1, 2.0), said(2, 2, 3.0)),
    )
    steps = build_steps(trace_of_records(manifest(geometry(layers=2)), [one]), predictor="heads")
    assert steps.horizons == 2
    assert steps.pred_offsets.tolist() == [0, 2, 4, 6, 8]
    assert steps.pred_score[[0, 2, 4, 6]].tolist() == [4.0, 1.0, 2.0, 3.0]
    coming = coming_scores(steps)
    assert coming[:, [3, 1]].tolist() == [[0.5, 0.25], [1.5, 0.25]]
    assert coming.sum() == 2.5


def test_without_predictions_of_the_next_forward_none_come() -> None:
    ids = np.array([[[1, 2]]] * 2)
    said = (Prediction("gate", 1, 2, np.array([3]), np.array([1.0])),)
    one = record(ids, predictions=said)
    steps = build_steps(trace_of_records(manifest(geometry(layers=2)), [one]))
    assert steps.horizons == 1
    assert not coming_scores(steps).any()
