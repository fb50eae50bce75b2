"""Decisions clocked again on another machine: the same bytes as deciding anew, where it may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from altered.split.fitting import fitting

from oled.hardware import Profile, load_runtime
from oled.policies.composition import Composition, composition_names, load_composition
from oled.policies.dispatch.coop import Coop
from oled.policies.interface import Admission
from oled.policies.part import Dispatch
from oled.policies.struct import Struct
from oled.sim import clock_replay as again
from oled.sim.api import simulate
from oled.sim.clock_replay import Decisions, repeatable
from oled.sim.prepared import PreparedTrace
from oled.sim.result import Result
from oled.sweeps import Configuration
from oled.trace.schema import Geometry
from oled.trace.synthetic import LAYERED, Workload, synthetic_trace

TOY = Geometry(
    moe_layers=(1, 2, 3),
    experts_per_layer=(16,) * 3,
    top_k=3,
    expert_bytes=(2**20,) * 3,
    num_layers=4,
    hidden_size=256,
    moe_intermediate_size=128,
)
LOAD = Workload(requests=4, prompt_blocks=2, blocks=3, block_length=8, horizons=2, scores=16)
NAMES = composition_names()
VARIANTS = {
    "as usual": {},
    "in waves": {"slots": 3, "staging": 1},
    "one budget": {"scope": "global", "slots": 0.29},
    "goes on": {"lifecycle": "persistent"},
    "in lockstep": {"batch_size": 2},
    "accounting": {"staging": "unbounded"},
}


def machine(gb_per_s: float) -> Profile:
    return Configuration.of([("hardware.h2d_pinned", f"{gb_per_s} GB/s")]).hardware()


SLOW = {"hardware": machine(1), "runtime": load_runtime("expert_loop")}
FAST = {
    "hardware": machine(1000),
    "runtime": load_runtime("graph_fused"),
    "cpu_kernel": "torch",
}


@pytest.fixture(scope="module")
def traces() -> tuple[PreparedTrace, PreparedTrace]:
    """What is judged, and what is learned from."""
    judged, learned = (synthetic_trace(TOY, LOAD, LAYERED, seed=seed) for seed in (1, 2))
    return PreparedTrace.of(judged), PreparedTrace.of(learned)


@pytest.fixture
def clocked_again(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each replay that is clocked from a log."""
    seen: list[Any] = []
    real = again._clock_again
    monkeypatch.setattr(again, "_clock_again", lambda *data: seen.append(0) or real(*data))
    return seen


def run(
    traces: tuple[PreparedTrace, PreparedTrace], policy: str | Composition, **fields: Any
) -> Result:
    options = {"slots": 5, "staging": 2, "references": False, **fields}
    return simulate(fitting(traces[0], policy), policy, calibration=traces[1], **options)


def flat(struct: Struct) -> Iterator[Any]:
    """The fields of a struct and of those in it."""
    for value in struct:
        yield from flat(value) if isinstance(value, Struct) else [value]


def same(one: Result, other: Result) -> bool:
    metrics = [{k: v for k, v in r.metrics.items() if k != "wall_s"} for r in (one, other)]
    arrays = [
        (r.forward_ns, *r.per_layer.values(), *r.replay.tally, *flat(r.replay.lanes))
        for r in (one, other)
    ]
    equal = all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))
    return equal and metrics[0] == metrics[1]


def plan_log(result: Result) -> bytes:
    return result.replay.tally.plans.tobytes() + result.replay.tally.orders.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_clocked_again_is_as_if_decided_anew(name: str, traces, clocked_again) -> None:
    composition = load_composition(name)
    expected = 0
    variants = VARIANTS if repeatable(composition) else {"as usual": {}}
    for variant, fields in variants.items():
        per_layer = composition.initial != "empty" or composition.admission is Admission.SEQUENTIAL
        if per_layer and fields.get("scope") == "global":
            continue  # refused
        remembering = traces[0].remembering(), traces[1]
        run(remembering, composition, **fields, **SLOW)
        found = run(remembering, composition, **fields, **FAST)
        assert same(found, run(traces, composition, **fields, **FAST)), variant
        expected += repeatable(composition)
    assert len(clocked_again) == expected


@pytest.mark.parametrize("name", NAMES)
def test_what_is_declared_independent_decides_the_same_on_every_machine(name: str, traces) -> None:
    logs = [plan_log(run(traces, name, plans=True, **place)) for place in (SLOW, FAST)]
    if load_composition(name).machine_independent:
        assert logs[0] == logs[1]


@pytest.mark.parametrize("name", ["oled", "hybrimoe", "dali", "oled_fill", "finemoe"])
def test_the_two_machines_tell_who_reads_costs_or_the_clock(name: str, traces) -> None:
    logs = [plan_log(run(traces, name, plans=True, **place)) for place in (SLOW, FAST)]
    assert logs[0] != logs[1]
    assert not load_composition(name).machine_independent


def test_a_part_says_nothing_wrong_by_saying_nothing() -> None:
    assert Dispatch.reads_costs


def test_a_wrong_declaration_is_seen(traces) -> None:
    class Boasting(Coop):
        reads_costs = False

    wrong = dataclasses.replace(load_composition("oled"), dispatch=Boasting())
    assert wrong.machine_independent
    logs = [plan_log(run(traces, wrong, plans=True, **place)) for place in (SLOW, FAST)]
    assert logs[0] != logs[1]


def test_other_decisions_are_not_taken_for_these(traces) -> None:
    remembering = traces[0].remembering(), traces[1]
    for policy in ("lru", "lfu"):
        for fields in ({"slots": 5}, {"slots": 6}, {"staging": 3}, {"lifecycle": "persistent"}):
            assert same(run(remembering, policy, **fields), run(traces, policy, **fields))
    assert len(remembering[0].decisions) == 8


def test_the_oldest_decisions_are_forgotten(traces) -> None:
    decisions = Decisions(room_bytes=1)
    remembering = dataclasses.replace(traces[0], decisions=decisions), traces[1]
    for _ in range(2):
        assert same(run(remembering, "lru"), run(traces, "lru"))
    assert len(decisions) == 0
