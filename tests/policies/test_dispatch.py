"""Dispatch: what each part does with a step, by hand or by a second, plain implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.policies.decide import classify_residency, decide
from oled.policies.dispatch.cheapest import Cheapest
from oled.policies.dispatch.coop import Coop
from oled.policies.dispatch.cpu import AllCpu
from oled.policies.dispatch.exact import Exact
from oled.policies.dispatch.makespan import MakespanGreedy
from oled.policies.dispatch.refresh import PeriodicRefresh
from oled.policies.dispatch.share import CpuShare
from oled.policies.dispatch.transfer import AllTransfer
from oled.policies.dispatch.two_ended import TwoEnded
from oled.policies.interface import (
    ABSENT,
    COPYING,
    DROPPED,
    IN_FLIGHT,
    LANDED,
    ON_CPU,
    ON_GPU,
    RESIDENT,
    STAGED,
    TRANSFER,
    Admission,
    Cache,
    Costs,
    Plan,
    Rules,
    Step,
)
from oled.policies.part import Allocation, Dispatch, Prefetch
from oled.policies.retention.expert_count import ExpertCount
from oled.sim.parts import Each, Parts
from oled.trace.schema import Phase
from tests.support.seeds import sized

from .build import call, make_cache, make_costs, make_plan, make_step, memory_of

ALL = [
    AllTransfer(),
    AllCpu(),
    Cheapest(),
    Cheapest(cpu_per_token=7, copy=70),
    Coop(),
    Coop(swaps=0),
    CpuShare(share=0.5),
    Exact(),
    MakespanGreedy(),
    PeriodicRefresh(),
    TwoEnded(),
    TwoEnded(gpu=0.5, cpu_per_token=1.0, cpu_first=0.79, copy=0.418),
]
EXPERTS = 16


def dispatched(
    part: Dispatch,
    step: Step,
    cache: Cache,
    costs: Costs | None = None,
    memory: Any = None,
) -> Plan:
    plan = make_plan(experts=EXPERTS)
    classify_residency(step, cache, plan)
    memory = memory_of(part, cache) if memory is None else memory
    call(part.dispatch, step, cache, costs or make_costs(), plan, memory, part.params())
    return plan


def cache_of(resident: Sequence[int] = (), slots: int = 4) -> Cache:
    return make_cache(experts=EXPERTS, slots=slots, resident={0: resident})


def places(step: Step, plan: Plan, place: int) -> list[int]:
    return [int(e) for i, e in enumerate(step.expert) if plan.place[i] == place]


def order(step: Step, plan: Plan) -> list[int]:
    """Transfers in the order that the dispatch asks for."""
    going = [i for i in range(step.expert.size) if plan.place[i] == TRANSFER]
    return [int(step.expert[i]) for i in sorted(going, key=lambda i: (plan.rank[i], i))]


# --- one by one ---------------------------------------------------------------------------------


def test_all_transfer_and_all_cpu() -> None:
    step = make_step([1, 2, 3])
    assert order(step, dispatched(AllTransfer(), step, cache_of([2]))) == [1, 3]
    plan = dispatched(AllCpu(), step, cache_of([2]))
    assert places(step, plan, ON_CPU) == [1, 3]
    assert places(step, plan, ON_GPU) == [2]


def test_cheapest_breaks_even_at_ten_tokens_in_the_units_of_its_code() -> None:
    step = make_step([1, 2, 3, 4], count=[9, 10, 11, 40])
    plan = dispatched(Cheapest(cpu_per_token=7, copy=70), step, cache_of([4]))
    assert places(step, plan, ON_CPU) == [1, 2]
    assert places(step, plan, TRANSFER) == [3]


def test_cheapest_counts_activations_wake_and_the_expert_itself() -> None:
    step = make_step([1, 2, 3], count=[1, 2, 3])
    # CPU 100, 131, 200 with activations 10 each way; GPU 100 + 20 + 31.
    costs = make_costs(cpu_ns=[0, 80, 131, 180], act_ns=10, copy_ns=100, copy_wake_ns=20, gpu_ns=31)
    plan = dispatched(Cheapest(), step, cache_of(), costs)
    assert places(step, plan, ON_CPU) == [1, 2]  # 100 < 151, 151 = 151
    assert places(step, plan, TRANSFER) == [3]  # 200 > 151


def test_share_of_the_misses_with_the_fewest_tokens_once_the_slots_are_full() -> None:
    step = make_step([1, 2, 3, 4, 5], count=[3, 1, 1, 2, 9])
    full, filling = cache_of([6, 7, 8, 9]), cache_of([6, 7, 8])
    assert order(step, dispatched(CpuShare(share=0.5), step, filling)) == [1, 2, 3, 4, 5]
    plan = dispatched(CpuShare(share=0.5), step, full)
    assert places(step, plan, ON_CPU) == [2, 3]  # half of five, rounded down
    assert order(step, plan) == [5, 1, 4]
    assert places(step, dispatched(CpuShare(share=1.0), step, full), TRANSFER) == []


def test_two_ended_worked_by_hand() -> None:
    # The list is 1 (resident, 5 tokens), 2 (resident, 1), 5 (miss, 4), 4 (miss, 2), 3 (miss, 1).
    # GPU 4 an expert, copy 10, CPU 3 a token and 2 for the first.
    #   GPU+1 4  <= CPU+3 5   -> GPU until 4
    #   GPU+2 8  >  CPU+3 5   -> CPU until 5
    #   GPU+2 8  <= CPU+4 11  -> GPU until 8
    #   GPU+5 14 >  CPU+4 11  -> CPU until 11
    #   GPU+5 14 <= CPU+5 23  -> copied
    step = make_step([1, 2, 3, 4, 5], count=[5, 1, 1, 2, 4])
    part = TwoEnded(gpu=4, cpu_per_token=3, cpu_first=2, copy=10)
    plan = dispatched(part, step, cache_of([1, 2]))
    assert places(step, plan, ON_GPU) == [1, 2]
    assert places(step, plan, ON_CPU) == [3, 4]
    assert places(step, plan, TRANSFER) == [5]


def test_two_ended_gives_light_residents_to_the_cpu_when_misses_run_out() -> None:
    step = make_step([1, 2, 3], count=[9, 8, 1])
    part = TwoEnded(gpu=10, cpu_per_token=1, cpu_first=0, copy=10)
    plan = dispatched(part, step, cache_of([1, 2, 3]))
    assert places(step, plan, ON_CPU) == [2, 3]
    assert places(step, plan, ON_GPU) == [1]


def test_makespan_greedy_worked_by_hand() -> None:
    # The group of 4 takes 40, so 10 a resident; a miss 110; the CPU 60, 120, 400 and 60.
    # At stake: 1 (resident, 50), 2 (miss, 10), 3 (resident, 390), 4 (miss, 50).
    #   3: GPU 10 <= CPU 400 -> GPU;  1: 20 <= 60 -> GPU;  4: 130 > 60 -> CPU;  2: 130 <= 180 -> GPU
    step = make_step([1, 2, 3, 4], count=[1, 2, 5, 1])
    costs = make_costs(gpu_ns=40, cpu_ns=[0, 60, 120, 200, 300, 400], copy_ns=100)
    plan = dispatched(MakespanGreedy(), step, cache_of([1, 3]), costs)
    assert places(step, plan, ON_GPU) == [1, 3]
    assert places(step, plan, ON_CPU) == [4]
    assert places(step, plan, TRANSFER) == [2]


def two_ended(
    counts: list[int], states: list[int], gpu: float, cpu: list[float], first: float, copy: float
) -> list[int]:
    """HybriMoE's rule with lists: the place of each expert."""
    here = [i for i in range(len(counts)) if states[i] in (RESIDENT, LANDED)]
    away = [i for i in range(len(counts)) if states[i] == ABSENT]
    waiting = sorted(here, key=lambda i: -counts[i]) + sorted(away, key=lambda i: -counts[i])
    place = [ON_GPU] * len(counts)
    gpu_done, cpu_done, copies = 0.0, first, 0
    while waiting:
        i, j = waiting[0], waiting[-1]
        begin = max(gpu_done, (copies + 1) * copy) if states[i] == ABSENT else gpu_done
        if begin + gpu <= cpu_done + cpu[counts[j]]:
            gpu_done = begin + gpu
            copies += states[i] == ABSENT
            place[i] = TRANSFER if states[i] == ABSENT else ON_GPU
            del waiting[0]
        else:
            cpu_done += cpu[counts[j]]
            place[j] = ON_CPU
            del waiting[-1]
    return place


def greedy(
    counts: list[int], states: list[int], gpu: int, cpu: list[int], first: int, copy: int
) -> list[int]:
    """DALI's rule with lists: the place of each expert."""
    time = [(gpu + copy * (s == ABSENT), cpu[n]) for n, s in zip(counts, states, strict=True)]
    place = [ON_GPU] * len(counts)
    gpu_done, cpu_done = 0, first
    for i in sorted(range(len(counts)), key=lambda i: -abs(time[i][0] - time[i][1])):
        if states[i] == IN_FLIGHT:
            continue
        if gpu_done + time[i][0] <= cpu_done + time[i][1]:
            gpu_done += time[i][0]
            place[i] = TRANSFER if states[i] == ABSENT else ON_GPU
        else:
            cpu_done += time[i][1]
            place[i] = ON_CPU
    return place


@st.composite
def situations(draw: Any) -> tuple[Step, Cache, Costs]:
    """A step of up to 12 experts anywhere between host and GPU, and a machine."""
    active = draw(st.integers(1, 12))
    count = draw(st.lists(st.integers(1, 8), min_size=active, max_size=active))
    states = draw(
        st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3]), min_size=active, max_size=active)
    )
    step = make_step(list(range(active)), count=count, tokens=8)
    cache = cache_of(slots=draw(st.integers(0, 12)))
    for expert, state in enumerate(states):
        cache.resident[0, expert] = state == RESIDENT
        cache.staged[0, expert] = {LANDED: STAGED, IN_FLIGHT: COPYING}.get(state, 0)
        cache.score[0, expert] = draw(st.integers(-3, 3))
    cache.used[0] = cache.resident.sum()
    cpu = np.cumsum([0, *draw(st.lists(st.integers(0, 60), min_size=8, max_size=8))])
    costs = make_costs(
        gpu_ns=draw(st.integers(1, 60)),
        cpu_ns=[int(ns) for ns in cpu],
        copy_ns=draw(st.integers(1, 120)),
        act_ns=draw(st.integers(0, 20)),
        copy_wake_ns=draw(st.integers(0, 20)),
        cpu_call_ns=draw(st.integers(0, 20)),
        cpu_contention_ppm=draw(st.sampled_from([1_000_000, 700_000])),
        link_contention_ppm=draw(st.sampled_from([1_000_000, 400_000])),
    )
    return step, cache, costs


@given(situations())
@settings(max_examples=sized(80))
def test_two_ended_and_greedy_agree_with_plain_lists(situation: tuple[Step, Cache, Costs]) -> None:
    step, cache, costs = situation
    counts, active = [int(n) for n in step.count], step.expert.size
    first = int(costs.cpu_call_ns + 2 * costs.act_out_ns[8])
    machine = (costs.cpu_ns[0].tolist(), first, int(costs.copy_ns[0]))
    group = int(costs.gpu_ns[0, 8, active])
    plan = dispatched(TwoEnded(), step, cache, costs)
    states = plan.state[:active].tolist()
    assert plan.place[:active].tolist() == two_ended(counts, states, group / active, *machine)
    plan = dispatched(MakespanGreedy(), step, cache, costs)
    assert plan.place[:active].tolist() == greedy(counts, states, group // active, *machine)


# --- TIDE ---------------------------------------------------------------------------------------


def test_refresh_worked_by_hand() -> None:
    part, cache = PeriodicRefresh(interval=2), cache_of([1], slots=2)
    memory = memory_of(part, cache)

    def transfers(phase: Phase, block: int, number: int) -> list[int]:
        step = make_step(
            [1, 2, 3, 4], count=[1, 5, 3, 3], phase=phase, block=block, denoising_step=number
        )
        cache.stamp[0, :5] = [0, 1, 2, 3, 4]
        plan = dispatched(part, step, cache, memory=memory)
        assert places(step, plan, ON_GPU) == [1]
        assert sorted(places(step, plan, ON_CPU) + places(step, plan, TRANSFER)) == [2, 3, 4]
        return places(step, plan, TRANSFER)

    busiest = [2, 4]  # 3 and 4 have equal tokens; 4 was mentioned later
    assert transfers(Phase.PREFILL, -1, -1) == busiest
    assert transfers(Phase.DENOISE, 7, 0) == busiest
    assert transfers(Phase.DENOISE, 7, 1) == busiest  # the whole first generated block
    assert transfers(Phase.COMMIT, 7, -1) == busiest
    assert transfers(Phase.DENOISE, 8, 0) == busiest
    assert transfers(Phase.DENOISE, 8, 1) == []
    assert transfers(Phase.DENOISE, 8, 2) == busiest
    assert transfers(Phase.COMMIT, 8, -1) == []


@given(situations())
@settings(max_examples=sized(40))
def test_what_a_refresh_copies_stays(situation: tuple[Step, Cache, Costs]) -> None:
    step, cache, costs = situation
    cache.staged[:] = 0
    cache.resident[0, np.flatnonzero(cache.resident[0])[int(cache.capacity[0]) :]] = 0
    cache.used[0] = cache.resident.sum()
    plan = make_plan(experts=EXPERTS)
    refresh, count = PeriodicRefresh(interval=1), ExpertCount()
    four = Each(count, Allocation(), refresh, Prefetch())
    decide(
        Parts(
            count.observe,
            lambda *_: None,
            lambda *_: None,
            refresh.dispatch,
            lambda *_: None,
            memory=Each(*(memory_of(part, cache) for part in four)),
            params=Each(*(part.params() for part in four)),
            cells=Each(*[np.zeros(0)] * 4),
        ),
        step,
        cache,
        costs,
        plan,
        Rules(int(Admission.COMPETE), False, False, False, 8, 0),
    )
    assert all(plan.stays[plan.order[: plan.transfers]] == 1)
    busiest = sorted(step.count, reverse=True)[: min(int(cache.capacity[0]), step.expert.size)]
    kept = sorted((n for e, n in zip(step.expert, step.count, strict=True) if cache.resident[0, e]))
    assert kept == sorted(busiest)


# --- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ALL, ids=repr)
@given(situation=situations())
@settings(max_examples=sized(40))
def test_every_miss_is_in_exactly_one_place(
    part: Dispatch, situation: tuple[Step, Cache, Costs]
) -> None:
    step, cache, costs = situation
    plan = dispatched(part, step, cache, costs)
    allowed = {
        ABSENT: {TRANSFER, ON_CPU, DROPPED},
        RESIDENT: {ON_GPU, ON_CPU},
        LANDED: {ON_GPU, ON_CPU},
        IN_FLIGHT: {ON_GPU},
    }
    for i in range(step.expert.size):
        assert plan.place[i] in allowed[plan.state[i]]
        assert part.transfers or plan.place[i] != TRANSFER
    ranks = [plan.rank[i] for i in range(step.expert.size) if plan.place[i] == TRANSFER]
    assert len(set(ranks)) in (len(ranks), 1 if ranks else 0)


@pytest.mark.parametrize("part", ALL, ids=repr)
def test_a_step_of_hits_alone(part: Dispatch) -> None:
    step = make_step([1, 2])
    plan = dispatched(part, step, cache_of([1, 2]), make_costs(cpu_ns=10_000))
    assert places(step, plan, ON_GPU) == [1, 2]


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (Cheapest, {"cpu_per_token": 7}),
        (Cheapest, {"copy": -1, "cpu_per_token": -1}),
        (Coop, {"swaps": -1}),
        (Coop, {"mu": -0.1}),
        (CpuShare, {"share": 1.5}),
        (PeriodicRefresh, {"interval": 0}),
        (TwoEnded, {"gpu": 1.0}),
        (TwoEnded, {"gpu": 1.0, "cpu_per_token": 1.0, "copy": 1.0, "cpu_first": -1.0}),
    ],
)
def test_wrong_values_are_refused_by_name(part: Any, values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        part(**values)
