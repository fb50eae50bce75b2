"""A rule on a recorded trace: block forwards are routed again, and results say so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from oled.altered.reroute import reroute_trace
from oled.altered.reroute.block_pool import BlockPool
from oled.altered.reroute.des_vote import DesVote
from oled.errors import UserError
from oled.policies.composition import load_composition
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
from oled.trace import (
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Manifest,
    Phase,
    RouterScores,
    TokenState,
    Trace,
    WeightKind,
    build_steps,
    trace_of_records,
)
from oled.trace.synthetic import LAYERED, Workload, synthetic_trace

SMALL = Geometry((1,), (4,), 2, (100,), 2)
TOY = Geometry((1, 2, 3), (16,) * 3, 3, (2**20,) * 3, 4, hidden_size=256, moe_intermediate_size=128)
LOAD = Workload(requests=2, prompt_blocks=2, blocks=2, block_length=8, scores=16)


def forward(number: int, phase: Phase, block: int, **changes: object) -> ForwardRecord:
    """Three tokens, the last one a pad: 0 and 1, 0 and 2, and the pad 3 and 2."""
    ids = np.array([[[0, 1], [0, 2], [3, 2]]])
    scores = np.array([[[0.5, 0.3, 0.1, 0.2], [0.5, 0.1, 0.3, 0.0], [0.0, 0.0, 0.4, 0.5]]])
    weights = np.take_along_axis(scores, ids, axis=2)
    every = np.broadcast_to(np.arange(4), (1, 3, 4))
    fields: dict[str, object] = {
        "request": 0,
        "pass_id": number,
        "phase": phase,
        "layers": np.array([1]),
        "expert_ids": ids,
        "weights": weights / weights.sum(axis=2, keepdims=True),
        "positions": np.arange(3),
        "token_ids": np.arange(3),
        "confidence": np.full(3, 0.5),
        "state": np.array([TokenState.MASKED, TokenState.MASKED, TokenState.PAD]),
        "accepted": np.zeros(3),
        "block": block,
        "scores": RouterScores(every, scores),
    }
    return ForwardRecord(**{**fields, **changes})  # type: ignore[arg-type]


def small_trace(**changes: object) -> Trace:
    manifest = Manifest(SMALL, WeightKind.SUM_ONE, ConfidenceKind.MAX_PROBABILITY)
    records = [
        forward(0, Phase.PREFILL, -1, **changes),
        forward(1, Phase.DENOISE, 0, **changes),
        forward(2, Phase.COMMIT, 0, **changes),
    ]
    return trace_of_records(manifest, records)


def test_a_trace_by_hand() -> None:
    # votes of the two tokens that are no pads: 0: 5/8 + 5/8, 1: 3/8, 2: 3/8; a pool of two is 0, 1
    trace = small_trace()
    changed, change = reroute_trace(trace, DesVote(0.5))
    ids = changed.routing.expert_ids.reshape(3, 3, 2)
    assert ids[0].tolist() == [[0, 1], [0, 2], [3, 2]]  # prefill
    assert ids[1].tolist() == ids[2].tolist() == [[0, 1], [0, 1], [3, 2]]
    np.testing.assert_allclose(changed.routing.weights[4], [5 / 6, 1 / 6], rtol=1e-6)
    assert change.kept_gate_mass == pytest.approx((1 + 5 / 8) / 2)
    assert change.active_ratio == pytest.approx(2 / 3)  # 0 and 1 of 0, 1 and 2
    assert change.unfilled_share == 0
    assert changed.hash != trace.hash
    assert build_steps(changed).count.tolist() == [2, 1, 1, 2, 2, 2, 2]


def test_few_recorded_scores_leave_slots_unfilled_and_are_told() -> None:
    kept = np.array([[[0, 1], [0, 2], [3, 2]]])
    values = np.array([[[0.5, 0.3], [0.5, 0.3], [0.5, 0.4]]])
    _, change = reroute_trace(small_trace(scores=RouterScores(kept, values)), DesVote(0.5))
    assert change.unfilled_share == pytest.approx(1 / 4)
    assert "25.0% of slots unfilled" in change.label


def test_scores_in_another_order_are_found() -> None:
    trace = small_trace()
    assert trace.scores is not None
    back = np.arange(len(trace.scores.forward))[::-1]
    columns = {
        field.name: getattr(trace.scores, field.name)
        for field in dataclasses.fields(trace.scores)
        if getattr(trace.scores, field.name) is not None
    }
    turned = dataclasses.replace(trace.scores, **{name: x[back] for name, x in columns.items()})
    one, _ = reroute_trace(trace, DesVote(0.5))
    other, _ = reroute_trace(dataclasses.replace(trace, scores=turned), DesVote(0.5))
    assert np.array_equal(one.routing.expert_ids, other.routing.expert_ids)


@pytest.fixture(scope="module")
def toy() -> Trace:
    return synthetic_trace(TOY, LOAD, LAYERED, seed=1)


@pytest.mark.parametrize("name", ["des_seq", "des_vote", "block_pool", "block_pool_fixed"])
def test_a_replay_is_labelled_and_counts_what_is_left(name: str, toy: Trace) -> None:
    subject = PreparedTrace.of(toy)
    plain = simulate(subject, "inter_iteration", slots=5, references=False).metrics
    result = simulate(subject, name, slots=5, references=False).metrics
    assert result["provenance"]["policy"] == name
    labels = [label for label in result["provenance"]["labels"] if "route-changing" in label]
    assert len(labels) == 1
    assert "cost only" in labels[0]
    assert 0 < result["kept_gate_mass"] < 1
    assert result["unfilled_share"] == 0
    before, after = ({k: v["accesses"] for k, v in m["phases"].items()} for m in (plain, result))
    assert after["denoise"] < before["denoise"]
    assert after["prefill"] == before["prefill"]
    assert "kept_gate_mass" not in plain
    assert not any("route" in label for label in plain["provenance"]["labels"])


def test_the_pool_bounds_the_active_set(toy: Trace) -> None:
    changed, _ = reroute_trace(toy, DesVote(0.25))
    steps = build_steps(changed)
    decoding = steps.block[steps.forward] >= 0
    assert np.diff(steps.offsets)[decoding].max() <= 4  # a quarter of 16


def test_batches_are_of_the_changed_routes(toy: Trace) -> None:
    subject = PreparedTrace.of(toy)
    changed = PreparedTrace.of(reroute_trace(toy, DesVote())[0])
    options = {"slots": 5, "batch_size": 2, "references": False}
    batched = simulate(subject, "des_vote", **options).metrics
    direct = simulate(changed, "inter_iteration", **options).metrics
    assert batched["accesses"] == direct["accesses"]


def test_a_bundled_trace_is_read_again_where_it_is_needed() -> None:
    subject = PreparedTrace.of("demo")
    assert subject.rerouted(DesVote()) is subject.rerouted(DesVote(0.15))
    assert subject.rerouted(DesVote()) is not subject.rerouted(DesVote(0.2))
    assert subject.rerouted(BlockPool()).hash == subject.hash


def test_traces_without_scores_are_refused_by_name() -> None:
    trace = synthetic_trace(TOY, dataclasses.replace(LOAD, scores=0), LAYERED, seed=1)
    with pytest.raises(UserError, match=r"policy 'des_vote' needs router scores .* score_width=M"):
        simulate(trace, "des_vote", slots=5)
    with pytest.raises(UserError, match="DesVote routes again by router scores"):
        reroute_trace(trace, DesVote())


def test_routes_are_not_changed_twice(toy: Trace) -> None:
    about = dataclasses.replace(toy.manifest, provenance={"reroute": DesVote().describe()})
    recorded = dataclasses.replace(toy, manifest=about)
    labels = simulate(recorded, "lru", slots=5, references=False).metrics["provenance"]["labels"]
    assert "routes of a model that ran under DesVote(share=0.15)" in labels
    with pytest.raises(UserError, match=r"under DesVote\(share=0.15\) already"):
        simulate(recorded, "des_vote", slots=5)


def test_a_composition_says_what_is_wrong_with_its_rule() -> None:
    plain = {
        "name": "x",
        "description": "x",
        "retention": {"_target_": "oled.policies.retention.lru.Lru"},
        "admission": "compete",
    }
    for rule, message in (
        ({"_target_": "oled.altered.reroute.des_vote.DesVote", "share": 2}, "reroute: share is 2"),
        ({"_target_": "oled.altered.reroute.des_vote.DesVote", "top": 2}, "DesVote has no 'top'"),
        ({"_target_": "oled.policies.retention.lru.Lru"}, "is no Reroute"),
    ):
        with pytest.raises(UserError, match=message):
            load_composition({**plain, "reroute": rule})
    assert load_composition({**plain, "reroute": None}).reroute is None
