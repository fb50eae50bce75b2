"""Traces of halves: what is shared, what stays, and that they cost what they should."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from oled.altered.split import PathPlan, split_geometry, split_trace, write_split_trace
from oled.altered.split.trace import share_expansions
from oled.errors import UserError
from oled.live.routing import form_of
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
from oled.trace import (
    NO_EXPERT,
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Manifest,
    Phase,
    TokenState,
    Trace,
    TraceError,
    WeightKind,
    build_steps,
    load,
    trace_of_records,
)
from oled.trace.check import check
from oled.trace.cut import slice_trace
from oled.trace.synthetic import LAYERED, Workload, synthetic_trace, write_synthetic

SMALL = Geometry((1, 3), (4, 4), 2, (300, 301), 4)
PLAN = PathPlan((np.array([0, 0, 2, 2]), np.array([0, 1, 2, 3])))
TOY = Geometry(
    (1, 2, 3), (16,) * 3, 3, (3 << 18,) * 3, 4, hidden_size=256, moe_intermediate_size=128
)
LOAD = Workload(requests=2, prompt_blocks=2, blocks=2, block_length=8, horizons=2, scores=16)


def small_trace() -> Trace:
    """Tokens of experts 0 and 1 (one expansion), 1 and 2 (two), and a pad."""
    ids = np.array([[[0, 1], [1, 2], [3, 2]], [[0, 1], [1, 2], [3, NO_EXPERT]]])
    weights = np.array([[[0.7, 0.3], [0.6, 0.4], [0.5, 0.5]], [[0.7, 0.3], [0.6, 0.4], [1.0, 0.0]]])
    record = ForwardRecord(
        request=0,
        pass_id=0,
        phase=Phase.DENOISE,
        layers=np.array([1, 3]),
        expert_ids=ids,
        weights=weights,
        positions=np.arange(3),
        token_ids=np.arange(3),
        confidence=np.full(3, 0.5),
        state=np.array([TokenState.MASKED, TokenState.MASKED, TokenState.PAD]),
        accepted=np.zeros(3),
        block=0,
        step=0,
    )
    manifest = Manifest(SMALL, WeightKind.SUM_ONE, ConfidenceKind.MAX_PROBABILITY)
    return trace_of_records(manifest, [record])


def test_expansions_are_shared_by_hand() -> None:
    ids = np.array([[5, 5, 2], [1, NO_EXPERT, 1], [3, 4, 3]])
    weights = np.array([[0.5, 0.25, 0.25], [0.5, 0.0, 0.5], [0.1, 0.2, 0.7]], np.float32)
    shared, summed = share_expansions(ids, weights)
    assert shared.tolist() == [[5, 2, NO_EXPERT], [1, NO_EXPERT, NO_EXPERT], [3, 4, NO_EXPERT]]
    np.testing.assert_allclose(summed, [[0.75, 0.25, 0], [1, 0, 0], [0.8, 0.2, 0]], rtol=1e-6)


def test_a_trace_by_hand() -> None:
    halves = split_trace(small_trace(), PLAN)
    assert halves.geometry.moe_layers == (1, 2, 4, 5)  # 1 and 3, each of which takes two numbers
    assert halves.geometry.experts_per_layer == (2, 4, 4, 4)
    assert halves.geometry.expert_bytes == (200, 100, 201, 100)
    assert (halves.geometry.num_layers, halves.geometry.dense_layers) == (6, 2)
    rows = {
        (int(layer), int(token)): ids.tolist()
        for layer, token, ids in zip(
            halves.routing.layer, halves.routing.token, halves.routing.expert_ids, strict=True
        )
    }
    assert rows[1, 0] == [0, NO_EXPERT]  # both experts expand as 0, which is number 0
    assert rows[1, 1] == [0, 1]  # 1 as 0, and 2, the second that is left
    assert rows[2, 0] == rows[4, 0] == rows[5, 0] == [0, 1]
    assert rows[4, 2] == rows[5, 2] == [3, NO_EXPERT]
    np.testing.assert_allclose(halves.routing.weights.sum(axis=1), 1, rtol=1e-6)
    said = halves.predictions
    assert said is not None
    assert said.layer.tolist() == [1, 4]
    assert said.target.tolist() == [2, 5]
    assert (
        said.expert_ids.tolist() == [1, 0, 2] * 2
    )  # 0.3 + 0.6, 0.7, 0.4; the pad's are not wanted
    steps = build_steps(halves)
    assert steps.expert[: steps.offsets[1]].tolist() == [0, 1]
    assert steps.count[: steps.offsets[1]].tolist() == [2, 1]  # a token that shares counts once


def test_what_is_said_is_what_comes(toy: Trace) -> None:
    steps = build_steps(split_trace(toy, PathPlan.at_random((16,) * 3, 0.5, 3)))
    assert steps.horizons == 1
    assert steps.pred_offsets is not None
    assert steps.pred_expert is not None
    for step in range(0, steps.num_steps, 2):
        said = steps.pred_expert[steps.pred_offsets[step] : steps.pred_offsets[step + 1]]
        came = steps.expert[steps.offsets[step + 1] : steps.offsets[step + 2]]
        assert sorted(said.tolist()) == came.tolist()
        assert steps.pred_offsets[step + 1] == steps.pred_offsets[step + 2]


@pytest.fixture(scope="module")
def toy() -> Trace:
    return synthetic_trace(TOY, LOAD, LAYERED, seed=1)


@pytest.mark.parametrize("fields", [{"slots": 5}, {"slots": 1.0}, {"slots": 5, "staging": 2}])
def test_own_expansions_alone_are_the_whole_experts(toy: Trace, fields: dict[str, object]) -> None:
    """Nothing pruned: the same hits and bytes, and the same time where nothing is copied."""
    own = PathPlan((np.arange(16),) * 3)
    whole = simulate(toy, "inter_iteration", **fields).metrics
    halves = simulate(split_trace(toy, own), "inter_iteration", **fields).metrics
    assert halves["hit_rate"] == whole["hit_rate"]
    assert halves["h2d_bytes"] == whole["h2d_bytes"]
    assert halves["layer_steps"] == 2 * whole["layer_steps"]
    for name in ("ideal_tpot_ns", "all_resident_tpot_ns"):
        assert halves[name] == pytest.approx(whole[name], rel=1e-4)
    if fields["slots"] == 1.0:
        assert halves["gpu_bytes_total"] < whole["gpu_bytes_total"]  # smaller staging slots
        decode = [m["phases"]["commit"]["time_ns"] for m in (halves, whole)]
        assert decode[0] == pytest.approx(decode[1], rel=1e-4)


def test_asking_for_projections_ahead_saves_time(toy: Trace) -> None:
    halves = PreparedTrace.of(split_trace(toy, PathPlan.at_random((16,) * 3, 0.5, 3)))
    plain, ahead = (
        simulate(halves, policy, slots=4, references=False).metrics
        for policy in ("inter_iteration", "pcomoe")
    )
    assert ahead["tpot_ns"] < plain["tpot_ns"]
    assert ahead["prefetch_bytes_wasted"] == 0
    assert ahead["prefetch_bytes_useful"] > 0
    assert ahead["h2d_bytes"] == plain["h2d_bytes"]


def test_pruned_expansions_leave_fewer_bytes_to_move(toy: Trace) -> None:
    totals = [
        simulate(split_trace(toy, PathPlan.at_random((16,) * 3, share, 3)), "lru", slots=0).metrics
        for share in (1.0, 0.5, 0.25)
    ]
    bytes_ = [metrics["h2d_bytes"] for metrics in totals]
    assert bytes_[0] > bytes_[1] > bytes_[2]


def test_a_streamed_trace_is_whole_and_the_same(tmp_path: Path, toy: Trace) -> None:
    write_synthetic(tmp_path / "whole", TOY, LOAD, LAYERED, seed=1)
    plan = PathPlan.at_random((16,) * 3, 0.5, 3, seed=2)
    written = load(write_split_trace(tmp_path / "whole", tmp_path / "halves", plan))
    assert not check(tmp_path / "halves").findings
    memory = split_trace(toy, plan)
    for name in ("routing", "predictions", "tokens"):
        for field in dataclasses.fields(getattr(memory, name)):
            ours, theirs = (getattr(getattr(t, name), field.name) for t in (memory, written))
            assert (
                np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
                if isinstance(ours, np.ndarray)
                else ours == theirs
            ), (name, field.name)
    assert written.manifest.provenance["plan"] == {"how": plan.how, "share": 0.5, "seed": 2}


def test_policies_of_halves_refuse_whole_experts(toy: Trace) -> None:
    with pytest.raises(UserError, match="policy 'pcomoe' needs expert halves"):
        simulate(toy, "pcomoe")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PathPlan((np.arange(4),)), "other layers or experts"),
        (PathPlan((np.zeros(4, int), np.arange(4))), "keeps 1 expansions, fewer"),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan: PathPlan, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_trace(small_trace(), plan)


def test_halves_are_not_divided_again() -> None:
    halves = split_geometry(SMALL, PLAN)
    again = PathPlan(tuple(np.arange(n) for n in halves.experts_per_layer))
    with pytest.raises(UserError, match="parts of experts already"):
        split_geometry(halves, again)
    with pytest.raises(TraceError, match="do not divide by 'expert_parts' 2"):
        dataclasses.replace(
            SMALL, expert_parts=2, moe_layers=(1,), experts_per_layer=(4,), expert_bytes=(3,)
        )
    assert Geometry.from_json(halves.to_json()) == halves
    assert "expert_parts" not in SMALL.to_json()


def test_sources_are_their_own() -> None:
    with pytest.raises(UserError, match="a source must be its own source"):
        PathPlan((np.array([1, 2, 2]),))
    with pytest.raises(UserError, match="not an expert of the layer"):
        PathPlan((np.array([0, 3, 2]),))
    for share in (0.25, 0.5, 1.0):
        plan = PathPlan.at_random((16, 12), share, 3, seed=4)
        assert plan.expansions == (max(3, round(16 * share)), max(3, round(12 * share)))
    with pytest.raises(UserError, match="share=0"):
        PathPlan.at_random((16,), 0, 3)
    assert PathPlan((np.arange(4),)).bytes_share == 1
    assert PathPlan((np.array([0, 0, 2, 2]),)).bytes_share == pytest.approx(2 / 3)


def test_halves_of_one_layer_go_together(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "whole", TOY, LOAD, LAYERED, seed=1)
    plan = PathPlan.at_random((16,) * 3, 0.5, 3)
    halves = write_split_trace(tmp_path / "whole", tmp_path / "halves", plan)
    assert load(halves).geometry.moe_layers == (1, 2, 3, 4, 5, 6)
    cut = load(slice_trace(halves, tmp_path / "cut", layers=[3, 4]))
    assert cut.geometry.moe_layers == (3, 4)
    assert not check(tmp_path / "cut").findings
    with pytest.raises(TraceError, match="take all of them or none"):
        slice_trace(halves, tmp_path / "half", layers=[2, 3])


def test_halves_are_simulated_and_not_run_live(toy: Trace) -> None:
    with pytest.raises(UserError, match="not run live"):
        form_of(split_trace(toy, PathPlan.at_random((16,) * 3, 0.5, 3)).geometry)
