"""At fixed decisions no time rises with a faster lane, as far as that is true of the model.

Launch groups are formed greedily, so that a base time of a group, a copy that waits for a slot and
the wake-up of a link that has rested may each come at a worse moment on a faster machine
(`docs/simulator.md`, "Faster and still slower"). The cases here leave these three out.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from oled.policies.part import Prefetch
from oled.sim import tally as r
from tests.support.seeds import seeds

from .build import Forward, Machine, OnCpu, compose, make_steps, replay
from .test_model import random_case

FASTER = {
    "link": ("copy",),
    "CPU": ("cpu_call", "cpu_expert", "cpu_per_token"),
    "GPU": ("head", "dense", "group_per_expert"),
    "way back": ("act_back",),  # an earlier begin of the CPU may slow a copy that is waited for
    "policy": ("policy",),
}


def plain_case(seed: int):
    """A random case whose policy decides the same on every machine, with a slot for each copy."""
    rng = np.random.default_rng(seed)
    steps, machine, policy, fields = random_case(rng)
    policy = dataclasses.replace(policy, prefetch=Prefetch())
    cpu, link = ((1_000_000, 1_000_000), (750_000, 250_000), (613_337, 500_000))[rng.integers(3)]
    machine = dataclasses.replace(
        machine,
        group_t0=0,
        group_per_token=0,
        copy_wake=0,
        cpu_contention_ppm=cpu,
        link_contention_ppm=link,
    )
    return steps, machine, policy, {**fields, "staging": 64}, rng


@pytest.mark.parametrize("lane", FASTER)
def test_no_time_rises_with_a_faster_lane(lane):
    for seed in seeds(150):
        steps, machine, policy, fields, rng = plain_case(seed)
        faster = {name: int(getattr(machine, name) * rng.random()) for name in FASTER[lane]}
        before = replay(steps, policy, machine, **fields)
        after = replay(steps, policy, dataclasses.replace(machine, **faster), **fields)
        assert after.tally.plans.tobytes() == before.tally.plans.tobytes(), f"seed {seed}"
        assert after.tally.end_ns[-1] <= before.tally.end_ns[-1], f"seed {seed}"


@pytest.mark.parametrize("shared", ["cpu_contention_ppm", "link_contention_ppm"])
def test_no_time_rises_with_more_memory_bandwidth(shared):
    for seed in seeds(150):
        steps, machine, policy, fields, rng = plain_case(seed)
        rate = getattr(machine, shared)
        more = dataclasses.replace(machine, **{shared: int(rng.integers(rate, 1_000_001))})
        before, after = (replay(steps, policy, m, **fields) for m in (machine, more))
        assert after.tally.end_ns[-1] <= before.tally.end_ns[-1], f"seed {seed}"


def test_lanes_work_no_longer_than_there_is_time():
    for seed in seeds(150):
        steps, machine, policy, fields, _ = plain_case(seed)
        sums = replay(steps, policy, machine, **fields).tally.by_phase.sum(axis=(0, 1))
        assert (sums[[r.BUSY_GPU, r.BUSY_H2D, r.BUSY_D2H, r.BUSY_CPU]] <= sums[r.TIME]).all()
        assert sums[r.BUSY_H2D] >= sums[r.TRANSFERS] * machine.copy  # no copy beats its lane


def test_a_faster_gpu_may_split_a_group():
    """Hit {0} from 10 on; copies of 1 and 2 land at 20 and 30. A group takes `base` + its size.

    19: the hits end at 30, and 1 and 2 are one group, 30-51. 18: they end at 29, so that 1
    computes 29-48 and 2 48-67.
    """
    steps = make_steps([Forward({0: {0: 1, 1: 1, 2: 1}})], [3])
    policy = compose(initial="first", dispatch=OnCpu(frozenset()))

    def end(base):
        machine = Machine(group_t0=base, group_per_expert=1, copy=10, copy_wake=0)
        return int(replay(steps, policy, machine, slots=1, staging=3).tally.end_ns[-1])

    assert (end(19), end(18)) == (51, 67)
