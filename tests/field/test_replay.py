"""Scenarios on the clock, by hand and against a second account of the same rules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from oled.field.events import stated, static_layers
from oled.field.replay import token_ns
from oled.field.scenario import Events, Memory, Scenario

SIZE = 1_000_000.0  # bytes: at 10 GB/s 100 us
MEMORY = Memory(cpu=10.0, link=5.0, both=12.0)


def one(
    cpu: int = 0, copied: int = 0, background: int = 0, ahead: int = 0, hits: int = 0
) -> Events:
    """A single layer of a single token."""
    values = (cpu, copied, background, ahead, hits)
    return Events(*(np.array([[value]], np.int64) for value in values))


def scenario(events: Events, memory: Memory = MEMORY, **changes: float) -> Scenario:
    plain = Scenario(
        dense_ns=50_000, head_ns=0, gpu_expert_ns=8_000, expert_bytes=SIZE, memory=memory,
        events=events,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    ("events", "time_ns"),
    [
        (one(hits=4), 50_000 + 4 * 8_000),
        (one(cpu=2), 50_000 + 200_000),
        (one(cpu=2, hits=4), 50_000 + 200_000),  # the hits' group is hidden
        (one(copied=2), 50_000 + 400_000 + 8_000),  # the last to land computes at the end
    ],
)
def test_one_lane_at_a_time(events, time_ns):
    assert token_ns(scenario(events)) == time_ns


def test_shares_are_uneven_and_add_up():
    """10² to 5² of 12 GB/s: 9.6 and 2.4."""
    cpu, link = MEMORY.shares()
    assert cpu * 10 == pytest.approx(9.6)
    assert link * 5 == pytest.approx(2.4)


def test_shares_never_exceed_what_a_lane_reaches_alone():
    """Both at once may deliver the sum of the two alone: then neither is slowed down."""
    assert Memory(10.0, 5.0, 40.0).shares() == (1.0, 1.0)
    cpu, link = Memory(10.0, 1.0, 10.9).shares()
    assert cpu == pytest.approx(1.0, abs=0.02)
    assert link <= 1.0


def test_a_cpu_expert_beside_a_copy_until_the_first_ends():
    """CPU: 1 MB at 9.6 GB/s, 104.17 us. The copy has 1 MB - 104.17 us * 2.4 left, alone at 5."""
    both = SIZE / 9.6
    rest = (SIZE - 2.4 * both) / 5
    found = token_ns(scenario(one(cpu=1, copied=1)))
    assert found == pytest.approx(50_000 + both + rest + 8_000, abs=3)


def test_background_copies_hide_under_the_gpus_time():
    """Two layers; the copy that the first asks for fits the second's dense part."""
    none = np.zeros((1, 2), np.int64)
    events = Events(none, none, np.array([[1, 0]]), none, none + 1)
    quiet = dataclasses.replace(events, background=none)
    long = {"dense_ns": 300_000.0}
    assert token_ns(scenario(events, **long)) == token_ns(scenario(quiet, **long))


def test_background_copies_slow_the_cpu_down():
    none = np.zeros((1, 2), np.int64)
    busy = Events(none + 2, none, np.array([[1, 0]]), none, none)
    quiet = dataclasses.replace(busy, background=none)
    assert token_ns(scenario(busy)) > token_ns(scenario(quiet))


def test_more_copies_than_the_link_can_take_are_waited_for():
    none = np.zeros((20, 4), np.int64)
    events = Events(none, none, none + 3, none, none + 1)
    link_ns = 4 * 3 * SIZE / MEMORY.link
    assert token_ns(scenario(events)) == pytest.approx(link_ns, rel=0.1)


def test_a_copy_ahead_that_lands_in_time_costs_nothing():
    none = np.zeros((1, 2), np.int64)
    early = Events(none, none, none, np.array([[1, 0]]), np.array([[4, 3]]))
    late = Events(none, np.array([[0, 1]]), none, none, np.array([[4, 3]]))
    in_time = token_ns(scenario(early, dense_ns=300_000.0))
    assert in_time == pytest.approx(2 * (300_000 + 4 * 8_000), abs=1)
    assert token_ns(scenario(late, dense_ns=300_000.0)) > in_time + 150_000


def test_against_a_second_account_of_the_rules():
    """Without copies that outlast a layer, layers are independent: their times add up."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        memory = Memory(*rng.uniform(5, 60, 2), rng.uniform(60, 100))
        cpu, copied, hits = rng.integers(0, 4, (3, 16, 6))
        none = np.zeros_like(cpu)
        found = token_ns(scenario(Events(cpu, copied, none, none, hits), memory))
        layers = zip(cpu.ravel(), copied.ravel(), hits.ravel(), strict=True)
        expected = sum(_layer_ns(memory, *layer) for layer in layers) / 16
        assert found == pytest.approx(expected, rel=2e-3)


def _layer_ns(memory: Memory, cpu: int, copied: int, hits: int) -> float:
    """The GPU computes hits, then every copy that has landed while it was busy as one group."""
    rate_cpu, rate_link = memory.shares()
    cpu_left, link_left = cpu * SIZE / memory.cpu, copied * SIZE / memory.link
    both = 0.0
    if cpu_left and link_left:
        both = min(cpu_left / rate_cpu, link_left / rate_link)
    cpu_end = both + cpu_left - both * rate_cpu * bool(both)
    one_copy = SIZE / memory.link
    landings = []
    for i in range(1, copied + 1):
        work = i * one_copy
        beside = both * rate_link
        landings.append(work / rate_link if work <= beside else both + work - beside)
    gpu = 8_000.0 * hits
    while landings:
        start = max(gpu, landings[0])
        group = [at for at in landings if at <= start + 1e-6]
        landings = landings[len(group) :]
        gpu = start + 8_000.0 * len(group)
    return 50_000 + max(gpu, cpu_end)


def test_a_faster_memory_is_never_slower():
    events = stated(36, 4, missing=40.0, copied=15.0, background=5.0)
    times = [token_ns(scenario(events, MEMORY.scaled(speed))) for speed in (0.5, 1.0, 2.0, 4.0)]
    assert times == sorted(times, reverse=True)


def test_static_layers_cost_their_experts():
    found = token_ns(scenario(static_layers(10, 4, 3), cpu_call_ns=7_000.0))
    assert found == 10 * 50_000 + 3 * (400_000 + 7_000) + 7 * 4 * 8_000
