"""SPICE: how far ahead it looks, and what becomes of a miss, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oled.policies.decide import classify_residency
from oled.policies.dispatch.approximate import Approximate
from oled.policies.interface import DROPPED, HOLD, ON_CPU, ON_GPU, TRANSFER
from oled.policies.kernel import NoMemory
from oled.policies.prefetch.look_ahead import LookAhead
from oled.sim.metrics import count_metrics
from tests.sim.build import Forward, Machine, compose, make_steps, replay

from .build import call, make_cache, make_costs, make_plan, make_queue, make_side, make_step

LAYERS = 5


def asked(mass: list[float], copy_ns: int, **fields: Any) -> list[int]:
    """Layers that are asked for at layer 0, where expert 1 of each has this `mass` of 2 tokens.

    A layer's experts compute in 10 ns.
    """
    steps = [make_step([0], layer=layer, tokens=2, clock=layer + 1) for layer in range(LAYERS)]
    horizons = LAYERS - 1
    side = make_side(steps, layers=LAYERS)._replace(
        pred_offsets=np.minimum(np.arange(LAYERS * horizons + 1), horizons),
        pred_expert=np.ones(horizons, np.uint16),
        pred_score=np.array(mass, np.float32),
        horizons=horizons,
    )
    queue, part = make_queue(), LookAhead(**fields)
    costs = make_costs(layers=LAYERS, copy_ns=copy_ns)
    rest = (costs, make_plan(), side, queue, NoMemory(), part.params())
    call(part.ask, steps[0], make_cache(layers=LAYERS), *rest)
    span = slice(queue.begin, queue.end)
    assert (queue.kind[span] == HOLD).all()
    assert queue.due[span].tolist() == queue.layer[span].tolist()  # one step a layer
    return queue.layer[span].tolist()


def test_it_looks_as_far_as_the_mean_mass_of_a_token_is_high_enough() -> None:
    """0.8 and 0.75 of a token are enough, 0.65 is not; what comes behind it does not count."""
    assert asked([1.6, 1.5, 1.3, 2.0], copy_ns=10) == [1, 2]
    assert asked([1.6, 1.5, 1.3, 2.0], copy_ns=10, confidence=0.6) == [1, 2, 3, 4]


def test_the_link_says_how_far_at_least() -> None:
    """A copy of 21 ns lasts three layers of 10 ns."""
    assert asked([0.0, 0.0, 0.0, 0.0], copy_ns=21) == [1, 2, 3]
    assert asked([0.0, 0.0, 0.0, 2.0], copy_ns=21) == [1, 2, 3, 4]


def test_the_horizon_ends_it() -> None:
    assert asked([2.0, 2.0, 2.0, 2.0], copy_ns=1000, horizon=2) == [1, 2]


def places(share: float, gate: list[float], **costs: Any) -> tuple[list[int], list[float]]:
    """Places and ranks of experts 0.., of which 0 is resident; one token each."""
    step = make_step(list(range(len(gate))), gate=gate)
    cache, plan, part = make_cache(resident={0: [0]}), make_plan(), Approximate(share=share)
    classify_residency(step, cache, plan)
    call(part.dispatch, step, cache, make_costs(**costs), plan, NoMemory(), part.params())
    return plan.place[: len(gate)].tolist(), plan.rank[: len(gate)].tolist()


def test_the_least_important_misses_are_given_up_within_the_share() -> None:
    """Of a mass of 4.0 a share of 0.25 is 1.0: 0.25 and 0.5 go, 0.5 more would be too much."""
    found, _ = places(0.25, [1.0, 0.5, 0.25, 0.5, 1.75], copy_ns=1, cpu_ns=1000)
    assert found == [ON_GPU, DROPPED, DROPPED, TRANSFER, TRANSFER]


def test_a_resident_is_never_given_up() -> None:
    found, _ = places(0.5, [0.125, 1.0, 2.0], copy_ns=1, cpu_ns=1000)
    assert found == [ON_GPU, DROPPED, TRANSFER]


def test_the_others_go_where_they_end_first() -> None:
    """Copies take 100, the CPU 60, the GPU 10: masses 4, 3, 2, 1 in this order.

    4: CPU at 60 against 110. 3: CPU at 120 against 110: copied. 2: CPU at 120 against 210. 1: CPU
    at 180 against 210.
    """
    found, rank = places(0.0, [9.0, 1.0, 2.0, 3.0, 4.0], copy_ns=100, cpu_ns=60)
    assert found == [ON_GPU, ON_CPU, ON_CPU, TRANSFER, ON_CPU]
    assert rank[3] == -3.0


def test_what_is_given_up_takes_no_time_and_its_mass_is_reported() -> None:
    """Dense 10, then the one expert that is kept, copied in 30 + 7, computed in 7.

    One of four tokens' mass is dropped: 0.25.
    """
    mass = np.zeros((2, 4), np.float32)
    mass[:, 0] = [3.0, 1.0]
    steps = make_steps([Forward({0: {0: 3, 1: 1}}, tokens=4)], [4], mass=mass)
    policy = compose("demand", dispatch=Approximate(share=0.25))
    outcome = replay(steps, policy, Machine(cpu_expert=1000), slots=2)
    assert outcome.tally.end_ns.tolist() == [10 + 37 + 7]
    found = count_metrics(outcome.tally.by_phase)
    assert (found["dropped"], found["transfers"], found["h2d_bytes"]) == (1, 1, 100)
    assert found["dropped_gate_share"] == 0.25


@pytest.mark.parametrize(
    "wrong", [{"confidence": 1.5}, {"confidence": -0.1}, {"horizon": 0}, {"share": 1.0}]
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    part: Any = Approximate if name == "share" else LookAhead
    with pytest.raises(ValueError, match=name):
        part(**wrong)
