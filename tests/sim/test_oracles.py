"""G14, and the oracles against the best of all possible replacements, found by trying them all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from oled.hardware.costs import CostTables
from oled.policies.composition import load_composition
from oled.sim import tally as r
from oled.sim.references import references
from tests.support.seeds import for_each_seed

from .build import Forward, Machine, make_steps, one_a_step, replay
from .cases import random_machine, random_steps

G14 = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3]


def hits(policy: str, steps, **fields) -> int:
    fields = {"lifecycle": "persistent", **fields}
    outcome = replay(steps, load_composition(policy), **fields)
    return int(outcome.tally.by_phase[..., r.HITS].sum())


@pytest.mark.parametrize(
    ("slots", "lru", "optimum", "with_bypass"), [(2, 0, 3, 4), (3, 4, 5, None), (4, 6, 6, 6)]
)
def test_g14_unit_sizes(slots, lru, optimum, with_bypass):
    steps = one_a_step(G14, 4)
    assert hits("lru", steps, slots=slots) == lru
    assert hits("naive_lru", steps, slots=slots) == lru
    assert hits("inter_iteration", steps, slots=slots) == lru
    assert hits("belady", steps, slots=slots) == optimum
    if with_bypass is not None:
        assert hits("oracle", steps, slots=slots) == with_bypass


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 4])
def test_g14_no_demand_policy_beats_the_optimum(slots):
    steps = one_a_step(G14, 4)
    best = hits("belady", steps, slots=slots)
    for policy in ("lru", "lfu", "in_cache_lfu", "lfu_aged", "lrfu", "naive_lru"):
        assert hits(policy, steps, slots=slots) <= best
    assert hits("oracle", steps, slots=slots) >= best


@pytest.mark.parametrize("policy", ["lru", "lfu", "belady", "oracle", "inter_iteration"])
def test_g14_with_room_for_all_only_first_uses_miss(policy):
    assert hits(policy, one_a_step(G14, 4), slots=1.0) == len(G14) - 4


def most_hits(sets: list[frozenset], slots: int, must_enter: bool) -> int:
    """Over all choices of what to keep after each step: at most `slots` residents and newcomers."""
    states = {frozenset(): 0}
    for active in sets:
        after: dict[frozenset, int] = {}
        for resident, so_far in states.items():
            found = so_far + len(resident & active)
            everyone = resident | active
            for size in range(min(slots, len(everyone)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(everyone), size)):
                    if not must_enter or active <= kept:
                        after[kept] = max(after.get(kept, 0), found)
        states = after
    return max(states.values())


@for_each_seed(30)
def test_oracles_find_the_most_hits_that_there_are(seed):
    """Active sets as one request; two layers pooled; mandatory insertion where the sets fit."""
    rng = np.random.default_rng(seed)
    sets = [
        (layer, frozenset(rng.permutation(4)[: rng.integers(1, 3)].tolist()))
        for _ in range(5)
        for layer in (0, 1)
    ]
    forwards = [
        Forward({0: dict.fromkeys(sorted(a), 1), 1: dict.fromkeys(sorted(b), 1)})
        for (_, a), (_, b) in zip(sets[::2], sets[1::2], strict=True)
    ]
    steps = make_steps(forwards, [4, 4])
    slots = int(rng.integers(0, 4))
    by_layer = [[active for la, active in sets if la == layer] for layer in (0, 1)]
    assert hits("oracle", steps, slots=slots) == sum(
        most_hits(layer, slots, must_enter=False) for layer in by_layer
    )
    if slots >= 2:
        assert hits("belady", steps, slots=slots) == sum(
            most_hits(layer, slots, must_enter=True) for layer in by_layer
        )
    named = [frozenset((layer, e) for e in active) for layer, active in sets]
    pool = int(rng.integers(0, 5))
    assert hits("oracle_pooled", steps, slots=pool, scope="global") == most_hits(
        named, pool, must_enter=False
    )


def test_the_oracle_of_a_request_does_not_know_the_next_one():
    """Expert 0 is used once in each request: only lifecycle `persistent` keeps it for that."""
    forwards = [Forward({0: {0: 1}}, 0), Forward({0: {1: 1}}, 0), Forward({0: {0: 1}}, 1)]
    steps = make_steps(forwards, [2])
    assert hits("oracle", steps, slots=1, lifecycle="request") == 0
    assert hits("oracle", steps, slots=1, lifecycle="persistent") == 1


def least_of_all_splits(counts: list[int], top_k: int, costs: CostTables) -> int:
    """The shortest layer-step over every choice of experts for the CPU; no copies, no policy."""
    times = []
    for size in range(len(counts) + 1):
        for on_cpu in itertools.combinations(range(len(counts)), size):
            left = [c for i, c in enumerate(counts) if i not in on_cpu]
            tokens = -(-sum(left) // top_k)
            gpu = int(costs.gpu_ns[0, tokens, len(left)])
            work = sum(int(costs.cpu_ns[0, counts[i]]) for i in on_cpu)
            cpu = costs.cpu_call_ns + work if on_cpu else 0
            times.append(max(gpu, cpu))
    return min(times)


@for_each_seed(20)
def test_the_relaxed_bound_lies_below_every_split(seed):
    rng = np.random.default_rng(seed)
    steps = random_steps(rng, [6], 2, 2, True)
    costs = random_machine(rng).tables(steps)
    found = references(steps, costs)
    for forward in range(steps.num_forwards):
        dense = int(costs.head_ns[forward])
        shortest = dense
        for s in range(steps.step_offsets[forward], steps.step_offsets[forward + 1]):
            counts = steps.count[steps.offsets[s] : steps.offsets[s + 1]].tolist()
            shortest += int(costs.dense_ns[forward]) + least_of_all_splits(counts, 2, costs)
        assert found.bound_relaxed_ns[forward] <= shortest
        assert found.bound_relaxed_ns[forward] >= dense


def test_the_relaxed_bound_is_reached_where_experts_are_alike():
    """Four experts of one token; GPU 5 + 2 n, CPU 4 + 21 each: the GPU alone (13) is best."""
    steps = make_steps([Forward({0: dict.fromkeys(range(4), 1)})], [4])
    bound = references(steps, Machine(dense=0).tables(steps)).bound_relaxed_ns
    assert bound.tolist() == [13]
    fast = Machine(dense=0, cpu_expert=1, cpu_per_token=0, cpu_call=0)  # CPU 1 each
    assert references(steps, fast.tables(steps)).bound_relaxed_ns.tolist() == [4]  # all on the CPU
