"""Slots that copies land in: waves, G13, and a pool of experts of different sizes."""

from __future__ import annotations

import itertools

from oled.sim import lanes as ln

from .build import Forward, Machine, compose, entries, make_steps, replay


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
