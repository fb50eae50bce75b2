"""Placements: static, EPLB and EPIC, worked by hand, by brute force, and what always holds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.parallel.layout import Layout
from oled.parallel.placement import LayerStep, Placement
from oled.parallel.placements.activation import activate, spread
from oled.parallel.placements.epic import Epic
from oled.parallel.placements.eplb import Eplb, pack, replicate
from oled.parallel.placements.forecast import Forecast
from oled.parallel.placements.static import Static
from oled.parallel.prices import Prices
from tests.support.seeds import sized

from .build import layout_of, make_prices, make_step, make_topology, past_of, random_step

loads = st.lists(st.integers(0, 20), min_size=2, max_size=6)


# --- layouts --------------------------------------------------------------------------------------


def test_contiguous_stretches_are_as_equal_as_can_be() -> None:
    found = Layout.contiguous(np.array([8, 5]), 3)
    assert found.primary.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 2, -1, -1, -1]]
    assert (found.holds.sum(axis=1) == (found.primary >= 0)).all()


def test_what_moved_comes_from_where_it_comes_fastest() -> None:
    """4 ranks in 2 nodes; expert 0 on 0 and 1: rank 2 gets it from 0, rank 3 gets expert 1 from
    2."""
    prices = make_prices(make_topology(4, per_node=2), num_experts=(2,))
    earlier = layout_of([[0], [0], [1], []], 2, [0, 2])
    later = layout_of([[0], [0], [0], [1]], 2, [0, 3])
    moves = later.moved(earlier, prices.topology.ns_per_byte)
    assert [moves.layer.tolist(), moves.source.tolist(), moves.target.tolist()] == [
        [0, 0],
        [0, 2],
        [2, 3],
    ]
    sent = moves.sent(prices.expert_bytes, 4)
    assert sent.sum() == 200
    assert sent[0, 2] == sent[2, 3] == 100


# --- EPLB -----------------------------------------------------------------------------------------


@settings(max_examples=sized(80))
@given(loads, st.integers(0, 4), st.integers(1, 4))
def test_copies_make_the_busiest_copy_as_light_as_can_be(
    load: list[int], extra: int, most: int
) -> None:
    extra = min(extra, len(load) * (most - 1))
    found = replicate(np.array(load, float), len(load) + extra, most)
    assert found.sum() == len(load) + extra
    assert ((found >= 1) & (found <= most)).all()
    options = [
        copies
        for copies in itertools.product(range(1, most + 1), repeat=len(load))
        if sum(copies) == len(load) + extra
    ]
    best = min(max(w / c for w, c in zip(load, copies, strict=True)) for copies in options)
    assert (np.array(load) / found).max() == best


@settings(max_examples=sized(80))
@given(loads, st.integers(1, 3))
def test_packs_are_filled_evenly_and_near_the_best_packing(load: list[int], packs: int) -> None:
    """Heaviest first is no optimum; against all packings it stays within 4/3 and one object."""
    room = -(-len(load) // packs)
    found = pack(np.array(load, float), np.arange(len(load)), packs)
    assert np.bincount(found, minlength=packs).max() <= room
    weight = np.bincount(found, weights=load, minlength=packs).max()
    best = min(
        max(sum(w for w, p in zip(load, where, strict=True) if p == one) for one in range(packs))
        for where in itertools.product(range(packs), repeat=len(load))
        if np.bincount(where, minlength=packs).max() <= room
    )
    assert best <= weight <= 4 / 3 * best + max(load)


def test_eplb_by_hand() -> None:
    """Tokens 2, 1, 1, 0 on 2 ranks with 3 slots each: 0 and 1 are doubled.

    Copies 0, 0, 2 of one token, 1, 1 of half a token, 3 of none: 0 to each rank, 2 to the first, 1
    to the second, 1 to the first (the second has it), 3 to the second. The first rank's tokens come
    first, so that 0's two tokens are served by 0 and 1 in turn.
    """
    prices = make_prices()
    step = make_step([0, 0, 1, 1], [0, 0, 1, 2])
    static = Layout.contiguous(prices.num_experts, 2)
    found = Eplb(spare=1).rebalance(past_of([step], prices), static, prices)
    assert found.holds[0].tolist() == [[True, True, True, False], [True, True, False, True]]
    assert found.primary.tolist() == [[0, 0, 0, 1]]
    assert Eplb(spare=1).deal(step, found, prices).ravel().tolist() == [0, 1, 0, 0]


def test_with_nodes_all_copies_of_an_expert_are_in_one() -> None:
    rng = np.random.default_rng(3)
    prices = make_prices(make_topology(4, per_node=2), num_experts=(8,), top_k=2)
    past = past_of([random_step(rng, prices) for _ in range(6)], prices)
    static = Layout.contiguous(prices.num_experts, 4)
    found = Eplb(spare=1).rebalance(past, static, prices).holds[0]
    nodes = found.reshape(2, 2, 8).any(axis=1)
    assert (nodes.sum(axis=0) == 1).all()
    across = Eplb(spare=1, by_node=False).rebalance(past, static, prices).holds[0]
    assert (across.reshape(2, 2, 8).any(axis=1).sum(axis=0) > 1).any()


# --- EPIC: activation -----------------------------------------------------------------------------


def test_a_standby_copy_takes_what_makes_the_slower_rank_fastest() -> None:
    """A group takes 10 + 2 a token + 5 an expert. 4 tokens of expert 0 and 2 of 1, all on rank 0.

    All on rank 0: 10 + 12 + 10 = 32. Expert 0 elsewhere: 19 and 10 + 8 + 5 = 23; half of it: 28 and
    19. So it moves as a whole. Then rank 1 is the busiest with 23: half back makes it 23 and 19,
    which is no gain.
    """
    prices = make_prices()
    layout = layout_of([[0, 1], [0, 2, 3]], 4, [0, 0, 1, 1])
    step = make_step([0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 1, 0])
    amount = activate(step, layout, prices)
    assert amount.tolist() == [[0, 2, 0, 0], [4, 0, 0, 0]]
    served = Epic().deal(step, layout, prices)
    assert served.ravel().tolist() == [1, 1, 0, 1, 0, 1]


def test_tokens_that_live_with_a_copy_go_there_first() -> None:
    first = np.zeros((4, 1), np.int64)
    step = make_step([0, 1, 0, 1], [2, 2, 2, 2])
    amount = np.zeros((2, 4), np.int64)
    amount[:, 2] = 3, 1
    assert spread(step, first, amount).ravel().tolist() == [0, 1, 0, 0]
    amount[:, 2] = 1, 3
    assert spread(step, first, amount).ravel().tolist() == [0, 1, 1, 1]
    assert first.sum() == 0


def best_time(step: LayerStep, layout: Layout, prices: Prices) -> int:
    """The least time of the busiest rank over every split of every expert's tokens."""
    counts = np.bincount(step.expert[step.expert >= 0], minlength=layout.holds.shape[2])
    options = []
    for e in np.flatnonzero(counts).tolist():
        ranks = np.flatnonzero(layout.holds[0, :, e])
        splits = itertools.product(range(int(counts[e]) + 1), repeat=ranks.size)
        options.append([(e, ranks, split) for split in splits if sum(split) == counts[e]])
    best = 10**9
    for choice in itertools.product(*options):
        amount = np.zeros(layout.holds.shape[1:], np.int64)
        for e, ranks, split in choice:
            amount[ranks, e] = split
        times = prices.group_ns(0, amount.sum(axis=1), np.count_nonzero(amount, axis=1))
        best = min(best, int(times.max()))
    return best


@settings(max_examples=sized(60))
@given(st.integers(0, 2**32 - 1))
def test_activation_lies_between_the_best_split_and_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prices = make_prices(per_token=int(rng.integers(0, 9)), per_expert=int(rng.integers(1, 9)))
    layout = Layout.contiguous(prices.num_experts, 2)
    holds = layout.holds | (rng.random(layout.holds.shape) < 0.5)
    step = make_step([0] * 6, rng.integers(0, 4, 6))
    found = activate(step, Layout(holds, layout.primary), prices)
    counts = np.bincount(step.expert.ravel(), minlength=4)
    assert (found.sum(axis=0) == counts).all()
    assert not (found[:, :] > 0)[~holds[0]].any()
    time = prices.group_ns(0, found.sum(axis=1), np.count_nonzero(found, axis=1)).max()
    plain = activate(step, layout, prices)
    without = prices.group_ns(0, plain.sum(axis=1), np.count_nonzero(plain, axis=1)).max()
    assert best_time(step, Layout(holds, layout.primary), prices) <= time <= without


# --- EPIC: migration ------------------------------------------------------------------------------


def one_hot_past(prices: Prices, rows: list[list[int]]) -> Any:
    """Steps of one layer whose tokens live where their expert's first rank is."""
    first = Layout.contiguous(prices.num_experts, prices.topology.ranks).primary[0]
    return past_of([make_step(first[row].tolist(), row) for row in rows], prices)


def test_experts_that_are_busy_together_are_parted_if_it_pays() -> None:
    """In both steps 0 and 1 have 3 tokens each and live on rank 0; 2 and 3 have none.

    An expert weighs 5 + 3 * 2 = 11. Swapping one leaves 11 instead of 22 in each step, less what
    its 3 tokens now travel: 3 * 8 bytes there and back at a quarter, 12 a step. So nothing is
    gained. With light tokens (1 byte, 1.5 a step) it is 9.5 a step, and copying 100 bytes takes 25:
    it pays in three steps and not in two.
    """
    prices = make_prices(most_tokens=16)
    past = one_hot_past(prices, [[0, 0, 0, 1, 1, 1]] * 2)
    static = Layout.contiguous(prices.num_experts, 2)
    assert Epic(spare=0, payback=1000).rebalance(past, static, prices).primary.tolist() == [
        [0, 0, 1, 1]
    ]
    light = make_prices(most_tokens=16, token_bytes=1)
    found = Epic(spare=0, payback=3).rebalance(past, static, light)
    assert found.primary.tolist() == [[1, 0, 0, 1]]
    assert (found.holds[0] == (found.primary[0] == np.arange(2)[:, None])).all()
    assert (Epic(spare=0, payback=2).rebalance(past, static, light).holds == static.holds).all()


def test_a_standby_copy_is_made_for_steps_that_differ() -> None:
    """0 and 1 are busy together in one step, 2 and 3 in the other: no swap helps, a copy does."""
    prices = make_prices(most_tokens=16, token_bytes=0)
    past = one_hot_past(prices, [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]])
    static = Layout.contiguous(prices.num_experts, 2)
    found = Epic(spare=1, payback=1000).rebalance(past, static, prices)
    assert found.primary.tolist() == static.primary.tolist()
    assert found.holds.sum() == 6
    forecast = Forecast.of(0, past, found, prices, spare=1)
    assert forecast.load().max(axis=1).tolist() == [11.0, 11.0]


@settings(max_examples=sized(40))
@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 2), (3, 3), (4, 2)]))
def test_no_rearrangement_is_predicted_to_be_slower(seed: int, gpus: tuple[int, int]) -> None:
    """Slots are kept, every expert has its first copy, and each change made the forecast faster."""
    rng = np.random.default_rng(seed)
    prices = make_prices(make_topology(*gpus), num_experts=(8,), top_k=2, most_tokens=16)
    past = past_of([random_step(rng, prices) for _ in range(4)], prices)
    layout = Layout.contiguous(prices.num_experts, gpus[0])
    forecast = Forecast.of(0, past, layout, prices, spare=1)
    base = np.bincount(layout.primary[0], minlength=gpus[0])
    for _ in range(6):
        better = forecast.improved(payback=10**9)
        if better is None:
            break
        assert total(better) < total(forecast)
        forecast = better
        assert (np.bincount(better.primary, minlength=gpus[0]) == base).all()
        assert better.holds[better.primary, np.arange(8)].all()
        assert (better.holds.sum(axis=1) <= base + 1).all()


def total(forecast: Forecast) -> float:
    return float(forecast.load().max(axis=1).sum() + forecast._exchange_ns())


# --- all ------------------------------------------------------------------------------------------

ALL = [Static(), Eplb(interval=2, spare=1), Epic(interval=2, spare=1), Epic(spare=0)]


@pytest.mark.parametrize("placement", ALL, ids=lambda p: type(p).__name__)
@settings(max_examples=sized(25))
@given(seed=st.integers(0, 2**32 - 1), gpus=st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2)]))
def test_every_token_is_served_where_its_expert_is(
    placement: Placement, seed: int, gpus: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    prices = make_prices(make_topology(*gpus), num_experts=(8, 5), top_k=2)
    layout = Layout.contiguous(prices.num_experts, gpus[0])
    slots = placement.slots(prices.num_experts, gpus[0])
    for _ in range(3):
        steps = [random_step(rng, prices, layer) for layer in (0, 1, 0, 1)]
        for step in steps:
            served = placement.deal(step, layout, prices)
            assert ((served >= 0) == (step.expert >= 0)).all()
            used = served >= 0
            assert layout.holds[step.layer, served[used], step.expert[used]].all()
        layout = placement.rebalance(past_of(steps, prices), layout, prices)
        known = layout.primary >= 0
        assert known.sum(axis=1).tolist() == [8, 5]
        assert (layout.holds.any(axis=1) == known).all()
        layers, experts = np.nonzero(known)
        assert layout.holds[layers, layout.primary[known], experts].all()
        assert (layout.holds.sum(axis=2) <= slots[:, None]).all()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: Static(spare=1), "a static placement has none"),
        (lambda: Eplb(spare=-1), "spare is -1"),
        (lambda: Epic(interval=-2), "interval is -2"),
        (lambda: Epic(moves=-1), "moves is -1"),
        (lambda: Epic(payback=-1), "payback -1"),
    ],
)
def test_impossible_values_are_refused(part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part()
