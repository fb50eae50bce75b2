"""Hit counts of LRU and in-cache LFU agree with libCacheSim on streams of one expert a step."""

from __future__ import annotations

import numpy as np
import pytest
from sim.build import one_a_step

from oled.hardware.costs import CostTables
from oled.policies.composition import load_composition
from oled.sim import tally as r
from oled.sim.prepare import replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import parse_slots

EXPERTS = 64


def libcachesim_hits(policy: str, accesses: list[int], capacity: int) -> int:
    libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    cache = getattr(libcachesim, policy)(cache_size=capacity)
    return sum(cache.get(libcachesim.Request(obj_id=e, obj_size=1)) for e in accesses)


def our_hits(policy: str, steps, costs: CostTables, capacity: int) -> int:
    settings = Settings(slots=capacity, lifecycle="persistent")
    budget = parse_slots(capacity, "layer", steps.num_experts, steps.expert_bytes)
    outcome = replay_steps(steps, costs, load_composition(policy), budget, settings)
    return int(outcome.tally.by_phase[..., r.HITS].sum())


@pytest.mark.parametrize(("theirs", "ours"), [("LRU", "lru"), ("LFU", "in_cache_lfu")])
@pytest.mark.parametrize("skew", [0.6, 1.0])
def test_hits_of_a_zipf_stream(theirs, ours, skew):
    from sim.build import Machine

    rng = np.random.default_rng(3)
    popularity = np.arange(1, EXPERTS + 1) ** -skew
    accesses = rng.choice(EXPERTS, 4000, p=popularity / popularity.sum()).tolist()
    steps = one_a_step(accesses, EXPERTS)
    costs = Machine().tables(steps)
    for capacity in (1, 2, 5, 13, 40, 64):
        assert our_hits(ours, steps, costs, capacity) == libcachesim_hits(
            theirs, accesses, capacity
        ), f"{capacity} slots"
