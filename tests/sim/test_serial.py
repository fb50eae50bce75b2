"""The blocking runtime: nothing overlaps, evicted experts may go back to the host first."""

from __future__ import annotations

import pytest

from oled.errors import UserError
from oled.sim import lanes as ln
from oled.sim import tally as r

from .build import Ask, Asks, Forward, Machine, OnCpu, compose, entries, make_steps, replay

MACHINE = Machine(
    head=8,
    dense=10,
    group_t0=5,
    group_per_expert=2,
    cpu_call=4,
    cpu_expert=20,
    cpu_per_token=1,
    act_out=3,
    act_back=2,
    copy=30,
    copy_wake=7,
    copy_out=25,
)
FORWARDS = [Forward({0: {0: 1, 1: 1}}), Forward({0: {2: 1, 3: 2, 4: 1}})]


def test_a_blocking_layer_to_the_nanosecond():
    """Two slots and one staging slot; expert 3 of the second forward runs on the CPU.

    First forward: dense 0-10; two copies of 30 + 7 (each finds the link idle) 10-47, 47-84; one
    group 5 + 2 x 2 = 9 ns, 84-93; head 93-101. Residents 0 and 1.
    Second: dense 101-111. LRU puts 2 and 4 in the place of 0 and 1, which go back to the host
    first: 111-136, 136-161. Copies of 2 and 4: 161-198, 198-235; their group 9 ns, 235-244.
    The CPU: activations out 3 (244-247), call 4 + expert 20 + 2 x 1 = 26 (247-273), back 2, 275.
    Head 275-283.
    """
    steps = make_steps(FORWARDS, [5])
    policy = compose(overlap=False, writes_back=True, dispatch=OnCpu(experts=frozenset({(1, 3)})))
    outcome = replay(steps, policy, MACHINE, slots=2, staging=1)
    assert entries(outcome) == [
        (ln.LOG_DENSE, 0, 10, 0, 0, 2),
        (ln.LOG_COPY, 10, 47, 0, 0, 0),
        (ln.LOG_COPY, 47, 84, 0, 0, 1),
        (ln.LOG_HITS, 84, 93, 0, 0, 2),
        (ln.LOG_HEAD, 93, 101, 0, -1, 0),
        (ln.LOG_DENSE, 101, 111, 1, 0, 4),
        (ln.LOG_BACK, 111, 136, 1, 0, 0),
        (ln.LOG_BACK, 136, 161, 1, 0, 1),
        (ln.LOG_COPY, 161, 198, 1, 0, 2),
        (ln.LOG_COPY, 198, 235, 1, 0, 4),
        (ln.LOG_HITS, 235, 244, 1, 0, 2),
        (ln.LOG_OUT, 244, 247, 1, 0, 2),
        (ln.LOG_CPU, 247, 273, 1, 0, 1),
        (ln.LOG_HEAD, 275, 283, 1, -1, 0),
    ]
    sums = outcome.tally.by_phase.sum(axis=(0, 1))
    assert sums[r.STALL_COPY] == 2 * 37 + 2 * 25 + 2 * 37
    assert sums[r.STALL_CPU] == 3 + 26 + 2
    assert sums[r.BUSY_GPU] == 2 * 10 + 2 * 9 + 2 * 8
    assert sums[r.BUSY_H2D] == 4 * 37
    assert sums[r.BUSY_D2H] == 2 * 25 + 3
    assert sums[r.BUSY_CPU] == 26


def test_a_blocking_layer_with_too_few_slots_proceeds_in_waves():
    """No residents, one staging slot: each copy (37) is computed (5 + 2) before the next.

    Forward 0: dense to 10, then 37, 7, 37, 7: ends at 98, head 8.
    """
    steps = make_steps(FORWARDS[:1], [5])
    outcome = replay(steps, compose(overlap=False), MACHINE, slots=0, staging=1)
    assert entries(outcome)[1:] == [
        (ln.LOG_COPY, 10, 47, 0, 0, 0),
        (ln.LOG_HITS, 47, 54, 0, 0, 1),
        (ln.LOG_COPY, 54, 91, 0, 0, 1),
        (ln.LOG_LANDED, 91, 98, 0, 0, 1),
        (ln.LOG_HEAD, 98, 106, 0, -1, 0),
    ]


def test_a_blocking_runtime_takes_no_prefetch():
    steps = make_steps(FORWARDS, [5])
    policy = compose(overlap=False, prefetch=Asks({0: [Ask(0, 4, due=1)]}))
    with pytest.raises(UserError, match="overlap: false"):
        replay(steps, policy, MACHINE, slots=2)
