"""Slots that copies land in: waves, G13, and a pool of experts of different sizes."""

from __future__ import annotations

import itertools

import pytest

from oled.errors import UserError
from oled.policies.dispatch.cpu import AllCpu
from oled.policies.interface import FILL
from oled.sim import lanes as ln
from oled.sim import tally as r

from .build import Ask, Asks, Forward, Machine, compose, entries, make_steps, replay, state_of


def copies(outcome):
    return [row for row in entries(outcome) if row[0] == ln.LOG_COPY]


def landed(outcome):
    return [row for row in entries(outcome) if row[0] == ln.LOG_LANDED]


def test_one_large_expert_makes_room_for_several_small_ones_in_a_pool():
    """400 bytes: the large expert of layer 0 leaves, the four small ones of layer 1 all fit."""
    forward = Forward({0: {0: 1}, 1: {0: 1, 1: 1, 2: 1, 3: 1}})
    steps = make_steps([forward], [2, 6], expert_bytes=[400, 100])
    machine = Machine(copy=40, copy_wake=0, group_t0=1, group_per_expert=0)
    outcome = replay(steps, compose("compete"), machine, slots="400B", scope="global", staging=1)
    assert outcome.cache.resident.sum(axis=1).tolist() == [0, 4]
    of_small = [row for row in copies(outcome) if row[4] == 1]
    gaps = [b[1] - a[2] for a, b in itertools.pairwise(of_small)]
    assert gaps == [0, 0, 0]  # nobody waits for a slot


# ---- G13: fewer slots than a token, or a step, needs


def test_g13_fewer_slots_than_top_k():
    """One slot, k = 2, one staging slot: two waves a step, and never an error at token 3."""
    forwards = [Forward({0: {0: 1, 1: 1}}), Forward({0: {2: 1, 3: 1}}), Forward({0: {0: 1, 3: 1}})]
    steps = make_steps(forwards, [4], top_k=2)
    outcome = replay(steps, compose("demand"), slots=1, staging=1)
    assert outcome.tally.by_phase[..., r.TRANSFERS].sum() == 5  # expert 3 is still there
    assert outcome.cache.used.tolist() == [1]


@pytest.mark.parametrize("admission", ["demand", "compete", "sequential", "frozen"])
@pytest.mark.parametrize("staging", [1, 2, 8, "unbounded"])
@pytest.mark.parametrize("slots", [0, 16])
def test_g13_a_step_that_touches_more_experts_than_there_are_slots(admission, staging, slots):
    """18 experts a step: each crosses at most once, whatever the waves."""
    touched = dict.fromkeys(range(18), 1)
    steps = make_steps([Forward({0: touched}), Forward({0: touched})], [20], top_k=2)
    outcome = replay(steps, compose(admission), Machine(copy=10), slots=slots, staging=staging)
    for forward in (0, 1):
        moved = [row[5] for row in copies(outcome) if row[3] == forward]
        assert (
            len(moved)
            == len(set(moved))
            == 18 - outcome.tally.by_phase[..., r.HITS].sum() * forward
        )
    sums = outcome.tally.by_phase.sum(axis=(0, 1))
    assert sums[r.MOVED_BYTES] == 100 * sums[r.TRANSFERS]
    assert staging == "unbounded" or outcome.cache.used[0] <= slots


@pytest.mark.parametrize("staging", [1, 2, 5])
def test_g13_no_more_experts_are_on_their_way_or_waiting_than_there_are_slots(staging):
    """No residents, so staging is all; a slot is taken from the copy's begin to its group's end."""
    touched = dict.fromkeys(range(18), 1)
    steps = make_steps([Forward({0: touched})], [20], top_k=2)
    outcome = replay(steps, compose(), Machine(copy=10), slots=0, staging=staging)
    for _, begin, *_ in copies(outcome):
        begun = sum(row[1] <= begin for row in copies(outcome))
        computed = sum(row[5] for row in landed(outcome) if row[2] <= begin)
        assert begun - computed <= staging


def test_g13_waves_of_one_slot():
    """No residents, one staging slot: copy 10 ns, group 5 ns, copy, group, ...; wake-up 0."""
    steps = make_steps([Forward({0: {0: 1, 1: 1, 2: 1}})], [3])
    machine = Machine(dense=0, copy=10, copy_wake=0, group_t0=3, group_per_expert=2)
    outcome = replay(steps, compose(), machine, slots=0, staging=1)
    assert [row[1:3] for row in copies(outcome)] == [(0, 10), (15, 25), (30, 40)]
    assert [row[1:3] for row in landed(outcome)] == [(10, 15), (25, 30), (40, 45)]


def test_g13_no_staging_slot_is_refused_with_the_minimum():
    steps = make_steps([Forward({0: {0: 1}})], [2])
    with pytest.raises(UserError, match="at least 1 staging slot"):
        replay(steps, compose(), slots=1, staging=0)
    with pytest.raises(UserError, match="at least 1 staging slot"):
        replay(steps, compose("frozen", dispatch=AllCpu(), prefill="stream"), slots=1, staging=0)


def test_g13_no_staging_slot_is_enough_where_all_misses_run_on_the_cpu():
    steps = make_steps([Forward({0: {0: 1, 1: 1}})], [2])
    policy = compose("frozen", dispatch=AllCpu(), initial="first")
    outcome = replay(steps, policy, slots=1, staging=0)
    sums = outcome.tally.by_phase.sum(axis=(0, 1))
    assert (sums[r.HITS], sums[r.CPU_MISSES], sums[r.MOVED_BYTES]) == (1, 1, 0)


def test_losers_go_in_the_first_waves():
    """Expert 2 is named last and stays. The others cross and compute first, in the order of ids."""
    steps = make_steps([Forward({0: {0: 1, 3: 1, 1: 1, 2: 1}})], [4])
    outcome = replay(steps, compose("compete"), slots=1, staging=1)
    assert [row[5] for row in copies(outcome)] == [0, 1, 3, 2]
    assert outcome.cache.resident[0].tolist() == [0, 0, 1, 0]


def test_an_evicted_hit_gives_its_slot_only_when_it_has_computed():
    """Resident 0 is a hit and loses its slot to 1, which is named last; 2 is used and discarded.

    The staging slot takes 2, 10-20. The hit has computed at 22: 1 takes its slot, 22-32.
    """
    steps = make_steps([Forward({0: {0: 1, 2: 1, 1: 1}})], [3])
    machine = Machine(copy=10, copy_wake=0, group_t0=10, group_per_expert=2)
    outcome = replay(steps, compose(initial="first"), machine, slots=1, staging=1)
    assert [(row[1], row[2], row[5]) for row in copies(outcome)] == [(10, 20, 2), (22, 32, 1)]


def test_prefetches_run_in_the_accounting_replay():
    steps = make_steps([Forward({0: {0: 1}, 1: {1: 1}})], [2, 2])
    policy = compose(prefetch=Asks({0: [Ask(1, 1, due=1)]}))
    machine = Machine(dense=50)
    outcome = replay(steps, policy, machine, slots=1, staging="unbounded")
    assert outcome.tally.by_phase[..., r.USEFUL_BYTES].sum() == 100


def test_the_accounting_replay_exceeds_the_budget_only_until_the_layer_s_next_step():
    """Two slots, three experts used: all three stay until the next step has been served."""
    forwards = [Forward({0: {0: 1, 1: 1, 2: 1}}), Forward({0: {0: 1}}), Forward({0: {2: 1}})]
    steps = make_steps(forwards, [4])
    exact = replay(steps, compose("demand"), slots=2, staging=8, lifecycle="persistent")
    free = replay(steps, compose("demand"), slots=2, staging="unbounded", lifecycle="persistent")
    hits = [state_of(x.tally.plans)[3:].tolist() for x in (exact, free)]
    assert hits == [[0, 1], [1, 1]]  # 0 was let go in the first step, or served in the second
    assert free.cache.used.tolist() == [2]


@pytest.mark.parametrize("policy_ns", [0, 50])
@pytest.mark.parametrize(("scope", "wait"), [("global", 1030), ("layer", 90)])
def test_a_fill_that_joins_the_pool_takes_room_from_everybody(policy_ns, scope, wait):
    """Nobody stays but the fill for layer 2, which lands while layer 1 copies, or decides.

    Pool of two, staging of two: the fill keeps one, so layer 1 has three slots, and its fourth copy
    waits for the first group (30 + 1000). Slots of a layer 2 of its own set a staging slot free.
    """
    many = dict.fromkeys(range(5), 100)
    forward = Forward({0: {0: 1}, 1: many, 2: {1: 1}}, tokens=500)
    steps = make_steps([forward], [6, 6, 6])
    policy = compose("frozen", prefetch=Asks({0: [Ask(2, 0, due=2, kind=FILL)]}))
    machine = Machine(
        copy_wake=0, group_t0=0, group_per_token=10, group_per_expert=0, policy=policy_ns
    )
    outcome = replay(steps, policy, machine, slots=2, scope=scope, staging=2)
    began = [row[1] for row in copies(outcome) if row[4] == 1]
    assert began[3] - began[0] == wait
    assert outcome.cache.resident[2].tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("size", "waits"),
    [
        (400, [0, 10, 1010, 2010, 3010]),
        (250, [0, 10, 20, 1010, 3010]),
        (100, [0, 10, 20, 30, 40]),
    ],
)
def test_a_fill_that_joins_the_pool_costs_the_slots_of_its_bytes(size, waits):
    """Pool of 400 bytes, staging of two. Layer 0: copy 10-20, group 20-30. Layer 1 begins at 40
    with 400 / 100 slots of the pool and one of staging, while the fill for layer 2 crosses
    until it lands and joins: a slot of staging falls free, and the pool has 400 - `size` bytes
    left.

    400: 5 + 1 - 4 = 2 slots, 250: 5 + 1 - 3 = 3, 100: 5 + 1 - 1 = 5. A copy takes 10 ns; when
    there is no slot left, the next one waits for the first group, 10-1010 after the first copy
    began. With 250 the second and third are one group, 1010-3010.
    """
    forward = Forward({0: {0: 1}, 1: dict.fromkeys(range(5), 100), 2: {1: 1}}, tokens=500)
    steps = make_steps([forward], [6, 6, 6], expert_bytes=[100, 100, size])
    policy = compose("frozen", prefetch=Asks({0: [Ask(2, 0, due=2, kind=FILL)]}))
    machine = Machine(copy=10, copy_wake=0, group_t0=0, group_per_token=10, group_per_expert=0)
    outcome = replay(steps, policy, machine, slots="400B", scope="global", staging=2)
    began = [row[1] for row in copies(outcome) if row[4] == 1]
    assert [begin - began[0] for begin in began] == waits
    assert outcome.cache.resident[2].tolist() == [1, 0, 0, 0, 0, 0]
