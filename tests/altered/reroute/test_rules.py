"""Route-changing rules: each by hand on one small layer, and what holds for all of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.altered.reroute import Reroute, Routed, route_inside
from oled.altered.reroute.block_pool import BlockPool
from oled.altered.reroute.des_seq import DesSeq
from oled.altered.reroute.des_vote import DesVote
from oled.altered.reroute.rerouter import Rerouter
from oled.altered.reroute.rule import UNKNOWN
from oled.trace.schema import NO_EXPERT
from tests.support.seeds import sized

RULES = (
    DesSeq(),
    DesSeq(0.25),
    DesVote(),
    DesVote(0.5),
    BlockPool(),
    BlockPool(0.5, fixed=True),
)


def routed(ids: object, weights: object, scores: object, chosen_by: object = None) -> Routed:
    table = np.array(scores, np.float32)
    biased = table if chosen_by is None else np.array(chosen_by, np.float32)
    return Routed(np.array(ids), np.array(weights, np.float32), table, biased)


def three_tokens() -> Routed:
    """Top-2 of 6 experts; every token's weights are its two best scores, scaled to add up to 1."""
    return routed(
        ids=[[0, 1], [0, 2], [3, 2]],
        weights=[[0.75, 0.25], [0.6, 0.4], [0.8, 0.2]],
        scores=[
            [0.6, 0.2, 0.1, 0.0, 0.05, 0.0],
            [0.3, 0.1, 0.2, 0.15, 0.0, 0.0],
            [0.05, 0.0, 0.1, 0.4, 0.0, 0.0],
        ],
    )


def members(pool: np.ndarray) -> list[int]:
    return np.flatnonzero(pool).tolist()


def test_des_seq_by_hand() -> None:
    # k' = 1 of 2: the first experts of the three tokens are 0, 0 and 3
    assert members(DesSeq(0.5).pool(three_tokens())) == [0, 3]
    assert members(DesSeq(1.0).pool(three_tokens())) == [0, 1, 2, 3]


def test_a_des_seq_pool_of_too_few_experts_is_filled_by_weight() -> None:
    one = routed([[4, 1, 2]], [[0.5, 0.2, 0.3]], [[0.0, 0.2, 0.3, 0.1, 0.5]])
    assert members(DesSeq(0.3).pool(one)) == [1, 2, 4]  # one seed, 4; then 2 and 1


def test_des_vote_by_hand() -> None:
    # votes: 0: 1.35, 1: 0.25, 2: 0.6, 3: 0.8
    assert members(DesVote(2 / 6).pool(three_tokens())) == [0, 3]
    assert members(DesVote(3 / 6).pool(three_tokens())) == [0, 2, 3]


def test_block_pool_by_hand() -> None:
    # largest scores of any token: 0.6, 0.2, 0.2, 0.4, 0.05, 0
    assert members(BlockPool(2 / 6).pool(three_tokens())) == [0, 3]
    assert members(BlockPool(3 / 6).pool(three_tokens())) == [0, 1, 3]  # 1 before 2: lower id


def test_routing_inside_by_hand() -> None:
    pool = np.isin(np.arange(6), [0, 3])
    ids, weights = route_inside(three_tokens(), pool, renormalise=True)
    # the second token loses 2, whose place 3 takes: score 0.15 at (0.6 + 0.4) / (0.3 + 0.2) = 2
    # a unit of score gives 0.3 beside its 0.6; scaled to 1 that is 1/3 beside 2/3
    assert ids.tolist() == [[0, 3], [0, 3], [3, 0]]
    expected = [[1.0, 0.0], [2 / 3, 1 / 3], [8 / 9, 1 / 9]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_weights_that_add_up_to_nothing_in_particular_stay_as_they_are() -> None:
    pool = np.isin(np.arange(6), [0, 3])
    raw = dataclasses.replace(
        three_tokens(), weights=np.array([[0.6, 0.2], [0.3, 0.2], [0.4, 0.1]], np.float32)
    )
    _, weights = route_inside(raw, pool, renormalise=False)
    np.testing.assert_allclose(weights, [[0.6, 0.0], [0.3, 0.15], [0.4, 0.05]], rtol=1e-6)


def test_replacements_go_by_the_biased_score_and_weigh_by_the_plain_one() -> None:
    layer = routed(
        ids=[[0, 1]],
        weights=[[1.5, 1.0]],
        scores=[[0.6, 0.4, 0.3, 0.2]],
        chosen_by=[[0.6, 0.5, 0.3, 0.45]],
    )
    ids, weights = route_inside(layer, np.array([True, False, True, True]), renormalise=True)
    assert ids.tolist() == [[0, 3]]
    np.testing.assert_allclose(weights, [[2.5 * 0.6 / 0.8, 2.5 * 0.2 / 0.8]], rtol=1e-6)


def test_unknown_scores_leave_slots_unused() -> None:
    layer = routed([[0, 1]], [[0.6, 0.4]], [[0.6, 0.4, UNKNOWN, UNKNOWN]])
    ids, weights = route_inside(layer, np.array([True, False, True, True]), renormalise=True)
    assert ids.tolist() == [[0, NO_EXPERT]]
    np.testing.assert_allclose(weights, [[1.0, 0.0]])


def test_unused_slots_and_experts_without_weights_stay() -> None:
    layer = routed(  # top-3 of 3 experts and one that computes nothing, id 3
        ids=[[NO_EXPERT, 0, 3]], weights=[[0.0, 0.7, 0.3]], scores=[[0.7, 0.2, 0.1]]
    )
    ids, weights = route_inside(layer, np.array([False, True, False]), renormalise=True)
    assert ids.tolist() == [[3, 1, NO_EXPERT]]
    np.testing.assert_allclose(weights, [[0.6, 0.4, 0.0]], rtol=1e-6)


def random_layer(seed: int) -> tuple[Routed, float]:
    """Sigmoid scores of T tokens, the k best by biased score, weights that add up to a constant."""
    rng = np.random.default_rng(seed)
    experts, tokens = int(rng.integers(4, 40)), int(rng.integers(1, 20))
    top_k, total = int(rng.integers(1, min(9, experts + 1))), float(rng.choice([1.0, 2.5]))
    scores = 1 / (1 + np.exp(-rng.normal(size=(tokens, experts))))
    biased = scores + rng.normal(size=experts) * 0.1
    ids = np.argsort(-biased, axis=1)[:, :top_k]
    own = np.take_along_axis(scores, ids, axis=1)
    return routed(ids, total * own / own.sum(axis=1, keepdims=True), scores, biased), total


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=sized(60))
@given(seed=st.integers(0, 2**32 - 1))
def test_what_holds_for_every_rule(rule: Reroute, seed: int) -> None:
    layer, total = random_layer(seed)
    pool = rule.pool(layer)
    ids, weights = route_inside(layer, pool, renormalise=True)
    assert pool.sum() >= layer.top_k
    assert pool[ids].all()  # nobody leaves the pool
    assert all(len(set(row)) == layer.top_k for row in ids.tolist())  # k of them, all different
    np.testing.assert_allclose(weights.sum(axis=1), total, rtol=1e-5)
    assert (weights > 0).all()
    whole = pool[layer.ids].all(axis=1)
    assert np.array_equal(ids[whole], layer.ids[whole])
    assert weights[whole].tobytes() == layer.weights[whole].tobytes()
    if isinstance(rule, DesVote | BlockPool):
        assert pool.sum() == max(layer.top_k, round(rule.share * layer.num_experts))
    if isinstance(rule, DesSeq):
        assert set(members(pool)) <= set(layer.ids.ravel().tolist())


@settings(max_examples=sized(60))
@given(seed=st.integers(0, 2**32 - 1))
def test_inside_a_pool_a_router_without_groups_would_have_chosen_the_same(seed: int) -> None:
    """Masking the scores outside the pool and taking the k best is the same routing."""
    layer, total = random_layer(seed)
    pool = DesVote(0.4).pool(layer)
    ids, weights = route_inside(layer, pool, renormalise=True)
    again = np.argsort(-np.where(pool, layer.chosen_by, -np.inf), axis=1)[:, : layer.top_k]
    score = np.take_along_axis(layer.scores, again, axis=1)
    assert np.array_equal(np.sort(ids, axis=1), np.sort(again, axis=1))
    own = np.take_along_axis(weights, np.argsort(ids, axis=1), axis=1)
    theirs = np.take_along_axis(total * score / score.sum(1, keepdims=True), again.argsort(1), 1)
    np.testing.assert_allclose(own, theirs, rtol=1e-5)


def test_a_kept_pool_lasts_for_its_block() -> None:
    first, other = random_layer(1)[0], random_layer(1)[0]
    other = dataclasses.replace(other, chosen_by=-other.chosen_by)
    drifting = Rerouter(BlockPool(0.3), renormalise=True)
    fixed = Rerouter(BlockPool(0.3, fixed=True), renormalise=True)
    assert not np.array_equal(drifting.pool((0, 0), 0, first), drifting.pool((0, 0), 0, other))
    kept = fixed.pool((0, 0), 0, first)
    assert np.array_equal(kept, fixed.pool((0, 0), 0, other))
    for elsewhere in (((0, 1), 0), ((1, 0), 0), ((0, 0), 1)):  # block, request, layer
        assert not np.array_equal(kept, fixed.pool(*elsewhere, other))


@pytest.mark.parametrize("make", [lambda: DesVote(0.0), lambda: BlockPool(1.5), lambda: DesSeq(-1)])
def test_shares_are_shares(make: object) -> None:
    with pytest.raises(ValueError, match="above 0, at most 1"):
        make()  # type: ignore[operator]
