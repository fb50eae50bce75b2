"""The clock of several GPUs: two GPUs by hand, and what holds for every placement."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.parallel import clock as c
from oled.parallel.clock import Around
from oled.parallel.placement import Placement
from oled.parallel.placements.epic import Epic
from oled.parallel.placements.eplb import Eplb
from oled.parallel.placements.static import Static
from oled.parallel.prices import Prices
from oled.parallel.routing import Routing
from oled.parallel.system import System
from oled.parallel.transport import Transport
from tests.support.seeds import sized

from .build import make_prices, make_step, make_topology, random_step


def system(placement: Placement, transport: str = "direct", chunks: int = 1) -> System:
    return System("test", "", "", placement, Transport(transport), chunks)


def routing_of(forwards: list[list[Any]]) -> Routing:
    """From the layer-steps of each forward; what only metrics need is left empty."""
    steps = [step for forward in forwards for step in forward]
    nothing: Any = None
    return Routing(
        steps=nothing,
        rows={},
        forward=np.repeat(np.arange(len(forwards)), [len(f) for f in forwards]),
        layer=np.array([step.layer for step in steps]),
        offsets=np.cumsum([0, *(len(step.home) for step in steps)]),
        home=np.concatenate([step.home for step in steps]),
        expert=np.concatenate([step.expert for step in steps]),
        tokens=np.zeros((0, 0), np.int64),
        context=np.zeros((0, 0), np.int64),
        shares=nothing,
    )


def run(
    forwards: list[list[Any]], prices: Prices, used: System, dense: int = 0, head: int = 0
) -> c.Tally:
    times = [np.full(len(forwards), ns, np.int64) for ns in (dense, head)]
    return c.run(routing_of(forwards), prices, Around(*times, policy_ns=0), used)


STEP = ([0, 0, 1, 1], [0, 0, 1, 2])  # homes and experts of 4 tokens, top-1


def test_two_gpus_by_hand() -> None:
    """0 and 1 live on rank 0, 2 and 3 on rank 1. A group takes 10 + 2 a token + 5 an expert.

    Rank 0 has 3 tokens of 2 experts: 26; rank 1 one of one: 17. One token of 8 bytes crosses from
    rank 1 to rank 0 and comes back: 2 * (2 + 3) = 10. Dense 7, head 4: 7 + 10 + 26 + 4 = 47.
    """
    tally = run([[make_step(*STEP)]], make_prices(), system(Static()), dense=7, head=4)
    row = tally.forwards[0]
    assert row[[c.TIME, c.DENSE, c.COMPUTE, c.COMPUTE_ALL]].tolist() == [47, 11, 26, 43]
    assert row[[c.TRANSPORT, c.TRANSPORT_SHOWN, c.STRAGGLE, c.SENT_BYTES]].tolist() == [
        10,
        10,
        9,
        16,
    ]
    assert row[[c.PAIRS, c.PAIRS_BUSIEST, c.MOVES, c.ACTIVATIONS]].tolist() == [4, 3, 0, 0]
    assert tally.rank_ns.tolist() == [26, 17]
    # Not less for any placement: 10 + 2 * 4 + 5 * 3 = 33 of work over two ranks, 17, and 11.
    assert row[c.LEAST] == 17 + 11


@pytest.mark.parametrize(("chunks", "time"), [(1, 36), (2, 31), (4, 29), (1000, 27)])
def test_finer_overlap_hides_transport_behind_computation(chunks: int, time: int) -> None:
    """(10 + 26 + (n - 1) * 26) / n, rounded up."""
    tally = run([[make_step(*STEP)]], make_prices(), system(Static(), chunks=chunks))
    assert tally.forwards[0, c.TIME] == time
    assert tally.forwards[0, c.TRANSPORT_SHOWN] == time - 26


def test_a_rebalancing_is_paid_for_before_its_forward() -> None:
    """EPLB with 3 slots a rank: rank 0 gets 2, rank 1 gets 0 and 1 (see the test of its placement).

    Each has one link: 200 bytes / 4 + 3 = 53. Then rank 0 has tokens of 0, 1 and 2: 10 + 6 + 15 =
    31; rank 1 one of 0: 17. Tokens of rank 0 on rank 1, and two of rank 1 on rank 0, cross: 2 * (4
    + 3) = 14.
    """
    used = system(Eplb(interval=1, spare=1))
    tally = run([[make_step(*STEP)]] * 2, make_prices(), used)
    rows = tally.forwards
    assert rows[:, c.MOVES].tolist() == [0, 3]
    assert rows[:, c.MOVED_BYTES].tolist() == [0, 300]
    assert rows[1, [c.MOVING, c.COMPUTE, c.TRANSPORT]].tolist() == [53, 31, 14]
    assert rows[:, c.TIME].tolist() == [36, 53 + 31 + 14]
    assert rows[1, c.ACTIVATIONS] == 1  # 0's second copy


def test_the_last_rank_to_end_its_dense_part_is_waited_for() -> None:
    around = Around(np.array([5]), np.array([2]), policy_ns=3)
    one = c.run(routing_of([[make_step(*STEP)] * 2]), make_prices(), around, system(Static()))
    assert one.forwards[0, [c.TIME, c.DENSE, c.POLICY]].tolist() == [2 * (36 + 5 + 3) + 2, 12, 6]


SYSTEMS = [
    system(Static()),
    system(Eplb(interval=2, spare=1)),
    system(Epic(interval=2, spare=1, payback=1000), "adaptive", 4),
    system(Epic(interval=1, spare=0, payback=10**9), "hierarchical"),
]


@pytest.mark.parametrize("used", SYSTEMS, ids=lambda s: type(s.placement).__name__)
@settings(max_examples=sized(25))
@given(seed=st.integers(0, 2**32 - 1), gpus=st.sampled_from([(1, 1), (2, 2), (4, 2)]))
def test_work_is_kept_time_bounded_and_every_move_paid(
    used: System, seed: int, gpus: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    prices = make_prices(make_topology(*gpus), num_experts=(8, 5), top_k=2)
    forwards = [[random_step(rng, prices, layer) for layer in (0, 1)] for _ in range(5)]
    tally = run(forwards, prices, used, dense=int(rng.integers(0, 9)))
    rows, ranks = tally.forwards, gpus[0]
    pairs = [sum(int((step.expert >= 0).sum()) for step in forward) for forward in forwards]
    assert rows[:, c.PAIRS].tolist() == pairs
    assert (rows[:, c.TIME] >= rows[:, c.LEAST]).all()
    mean = -(-rows[:, c.COMPUTE_ALL] // ranks)
    assert (rows[:, c.COMPUTE] >= mean).all()
    around = rows[:, c.DENSE] + rows[:, c.POLICY] + rows[:, c.MOVING]
    parts = around + rows[:, c.COMPUTE] + rows[:, c.TRANSPORT_SHOWN]
    assert (rows[:, c.TIME] == parts).all()
    assert (rows[:, c.TRANSPORT_SHOWN] <= rows[:, c.TRANSPORT]).all()
    assert (rows[:, c.MOVED_BYTES] == 100 * rows[:, c.MOVES]).all()
    assert ((rows[:, c.MOVING] > 0) == (rows[:, c.MOVES] > 0)).all()
    assert (rows[:, c.STRAGGLE] == ranks * rows[:, c.COMPUTE] - rows[:, c.COMPUTE_ALL]).all()
    assert tally.rank_ns.sum() == rows[:, c.COMPUTE_ALL].sum()
    if ranks == 1:
        assert not rows[:, [c.TRANSPORT, c.STRAGGLE, c.SENT_BYTES, c.MOVES, c.ACTIVATIONS]].any()
    again = run(forwards, prices, used, dense=int(rows[0, c.DENSE] // 2))
    assert again.forwards.tobytes() == rows.tobytes()
    assert again.layout.holds.tobytes() == tally.layout.holds.tobytes()


@settings(max_examples=sized(20))
@given(seed=st.integers(0, 2**32 - 1))
def test_activation_and_overlap_never_make_a_step_s_experts_slower(seed: int) -> None:
    """With the same copies everywhere: the busiest rank under EPIC is no slower than first
    copies."""
    rng = np.random.default_rng(seed)
    prices = make_prices(make_topology(3), num_experts=(8,), top_k=2)
    forwards = [[random_step(rng, prices)] for _ in range(6)]
    active = Epic(interval=2, spare=2, payback=10**6)
    passive = _Passive(**dataclasses.asdict(active))
    rows = [run(forwards, prices, system(placement)).forwards for placement in (active, passive)]
    assert (rows[0][:, c.MOVES] == rows[1][:, c.MOVES]).all()
    assert (rows[0][:, c.COMPUTE] <= rows[1][:, c.COMPUTE]).all()
    assert rows[1][:, c.ACTIVATIONS].sum() == 0


class _Passive(Epic):
    """EPIC that leaves its standby copies alone."""

    __slots__ = ()
    deal = Placement.deal
