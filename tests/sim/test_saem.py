"""SAEM on the clock: what becomes resident within a stage, and what the reset costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from oled.policies.composition import load_composition
from oled.sim import tally as r
from oled.trace.schema import Phase

from .build import Forward, Machine, make_steps, replay
from .cases import random_calibration, random_machine, random_steps
from .diary import watched


@pytest.mark.parametrize("name", ["saem", "saem_oracle"])
def test_within_a_stage_only_the_held_set_moves_in_and_none_of_it_out(name: str) -> None:
    moved = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        steps = random_steps(rng, [8, 6], top_k=2, requests=2, diffusion=True)
        composition, before, _ = watched(load_composition(name))
        learned = random_calibration(rng, steps)
        replay(steps, composition, random_machine(rng), learned, slots=int(rng.integers(1, 7)))
        prompt = steps.phase == Phase.PREFILL
        stage = np.stack([steps.request, steps.block, prompt])[:, steps.forward]
        for layer in range(2):
            seen = [s for s in before if s.layer == layer and not stage[2, s.index]]
            for one, other in itertools.pairwise(seen):
                if (stage[:, one.index] != stage[:, other.index]).any():
                    continue
                np.testing.assert_array_equal(one.score[layer], other.score[layer])
                held = one.score[layer] >= 1.0
                was, now = one.resident[layer] != 0, other.resident[layer] != 0
                assert not (now & ~was & ~held).any()
                assert not (was & ~now & held).any()
                moved += int((now & ~was).sum())
    assert moved > 0


def test_the_reset_is_copied_in_link_time_and_pays_from_the_next_forward_on() -> None:
    """One slot. Block 0 uses expert 1 twice; at block 1 it is copied in the step that begins it.

    Step: dense 10, then the CPU: out 3, call 4 + 21, back 2 = 30. The copy of 1 begins at the first
    step of block 1, as its routing is known, and takes 30 + 7 on the idle link: it lands in the
    next forward's dense part (10 + 30 = 40 a forward, copy from 10 to 47 of the third one: 7 into
    the next) and is a hit there: 10 + 5 + 2.
    """
    forwards = [Forward({0: {1: 1}}, block=block, step=n) for block in (0, 1) for n in range(2)]
    steps = make_steps(forwards, [3])
    outcome = replay(steps, load_composition("saem"), Machine(), slots=1)
    took = (outcome.tally.end_ns - outcome.tally.begin_ns).tolist()
    assert took == [40, 40, 40, 17]
    sums = outcome.tally.by_phase.sum(axis=(0, 1))
    assert (sums[r.CPU_MISSES], sums[r.HITS], sums[r.TRANSFERS]) == (3, 1, 0)
    assert (sums[r.USEFUL_BYTES], sums[r.WASTED_BYTES]) == (100, 0)


def test_the_oracle_copies_a_stage_earlier() -> None:
    forwards = [Forward({0: {1: 1}}, block=block, step=n) for block in (0, 1) for n in range(2)]
    steps = make_steps(forwards, [3])
    outcome = replay(steps, load_composition("saem_oracle"), Machine(), slots=1)
    assert (outcome.tally.end_ns - outcome.tally.begin_ns).tolist() == [40, 17, 17, 17]
