"""What holds for every shipped policy on any workload, machine and cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.policies.allocation.uniform import Uniform
from oled.policies.composition import Composition, composition_names, load_composition
from oled.policies.interface import (
    ABSENT,
    DROPPED,
    LANDED,
    ON_CPU,
    ON_GPU,
    RESIDENT,
    TRANSFER,
    Admission,
)
from oled.policies.prefetch.none import NoPrefetch
from oled.sim import lanes as ln
from oled.sim import tally as r
from oled.sim.prepare import Replay
from oled.sim.references import references
from tests.support.seeds import sized

from .build import Machine, entries, replay
from .cases import random_calibration, random_machine, random_steps
from .diary import watched

NAMES = composition_names()


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One configuration and its outcome, compiled and watched."""

    composition: Composition
    steps: object
    machine: Machine
    fields: dict
    outcome: Replay
    again: Replay
    before: list
    after: list

    @property
    def sums(self) -> np.ndarray:
        return self.outcome.tally.by_phase.sum(axis=(0, 1))

    @property
    def pooled(self) -> bool:
        return (self.composition.scope or self.fields["scope"]) == "global"

    @property
    def bounded(self) -> bool:
        return self.fields["staging"] != "unbounded"

    def residents(self, layer: int, resident: np.ndarray) -> set[int]:
        return set(np.flatnonzero(resident[layer]).tolist())


def make_case(name: str, seed: int) -> Case:
    """A random configuration that the policy accepts."""
    rng = np.random.default_rng(seed)
    composition = load_composition(name)
    needs = composition.needs
    num_experts = rng.integers(3, 9, rng.integers(1, 4)).tolist()
    uneven = rng.random() < 0.3
    steps = random_steps(
        rng,
        num_experts,
        top_k=int(rng.integers(1, 4)),
        requests=int(rng.integers(1, 4)),
        diffusion=bool({"blocks", "stages"} & needs or rng.random() < 0.7),
        expert_bytes=[int(b) for b in rng.choice([100, 200, 300], len(num_experts))]
        if uneven
        else 100,
        predictions=bool({"predictions", "coming"} & needs or rng.random() < 0.5),
        scores=bool("scores" in needs or rng.random() < 0.5),
        foresees="coming" in needs,
        drafts="drafts" in needs,
    )
    fields = {
        "slots": int(rng.integers(0, max(num_experts) + 1)),
        "scope": "layer",
        "staging": int(rng.integers(1, 9)) if rng.random() < 0.9 else "unbounded",
        "lifecycle": str(rng.choice(["request", "persistent"])),
    }
    may_pool = composition.initial == "empty" and composition.admission != Admission.SEQUENTIAL
    if composition.scope is None and may_pool and rng.random() < 0.25:
        fields["scope"] = "global"
        fields["slots"] = float(rng.random())
    learned = None
    if "calibration" in needs or rng.random() < 0.3:
        learned = random_calibration(rng, steps)
    machine = random_machine(rng)
    run = functools.partial(replay, steps, machine=machine, calibration=learned, **fields)
    seen, before, after = watched(composition)
    return Case(
        composition,
        steps,
        machine,
        fields,
        run(composition),
        run(seen),
        before,
        after,
    )


def for_all_policies(check):
    """Run a check on a handful of random cases of every composition."""

    @pytest.mark.parametrize("name", NAMES)
    @settings(max_examples=sized(4))
    @given(seed=st.integers(0, 2**32 - 1))
    def test(name, seed):
        check(make_case(name, seed))

    return test


def check_drivers(case: Case) -> None:
    """Compiled and in Python, and when run again: the same bytes."""
    assert case.outcome.lanes.log.tobytes() == case.again.lanes.log.tobytes()
    for one, other in zip(case.outcome.tally, case.again.tally, strict=True):
        assert one.tobytes() == other.tobytes()


def check_books(case: Case) -> None:
    """Every access is a hit or one kind of miss; layers, phases and bytes add up."""
    rows = case.outcome.tally.by_phase
    misses = (r.TRANSFERS, r.LATE_MISSES, r.CPU_MISSES, r.DROPPED_MISSES)
    assert (rows[..., r.ACCESSES] == rows[..., (r.HITS, *misses)].sum(axis=-1)).all()
    sums, layers = case.sums, case.outcome.tally.by_layer.sum(axis=0)
    assert sums[r.ACCESSES] == case.steps.expert.size
    assert sums[r.TOKEN_ACCESSES] == case.steps.count.sum()
    assert sums[r.LAYER_STEPS] == layers[r.L_STEPS] == case.steps.num_steps
    assert sums[r.FORWARDS] == case.steps.num_forwards
    for total, by_layer in (
        (r.ACCESSES, r.L_ACCESSES),
        (r.HITS, r.L_HITS),
        (r.TRANSFERS, r.L_TRANSFERS),
        (r.CPU_MISSES, r.L_CPU),
        (r.SLOTS, r.L_SLOTS),
    ):
        assert sums[total] == layers[by_layer]
    place, state = case.outcome.tally.plans >> 2 & 3, case.outcome.tally.plans & 3
    size = np.repeat(case.steps.expert_bytes[case.steps.layer], np.diff(case.steps.offsets))
    ahead = sums[[r.USEFUL_BYTES, r.WASTED_BYTES, r.LATE_BYTES]].sum()
    assert sums[r.MOVED_BYTES] == size[place == TRANSFER].sum() + ahead
    assert sums[r.BYTES_ACCESSED] == size.sum()
    hit = (state == RESIDENT) | ((state == LANDED) & (place != ON_CPU))
    assert sums[r.BYTES_HIT] == size[hit].sum()
    assert sums[r.REUSED] <= sums[r.TRANSFERRED_BEFORE] <= sums[r.TRANSFERS]


def check_time(case: Case) -> None:
    """Forwards follow each other; the GPU's work and its waits make up all the time there is."""
    tally, sums = case.outcome.tally, case.sums
    assert tally.begin_ns[0] == 0
    assert (tally.begin_ns[1:] == tally.end_ns[:-1]).all()
    assert (tally.end_ns >= tally.begin_ns).all()
    waits = sums[[r.STALL_COPY, r.STALL_CPU, r.STALL_POLICY]].sum()
    assert sums[r.BUSY_GPU] + waits == sums[r.TIME] == tally.end_ns[-1]
    assert (sums[[r.BUSY_H2D, r.BUSY_D2H, r.BUSY_CPU]] <= sums[r.TIME]).all()
    heads = case.steps.num_forwards * case.machine.head
    assert tally.by_layer[:, r.L_TIME].sum() + heads == sums[r.TIME]


def check_lanes(case: Case) -> None:
    """On each lane one thing at a time, begun no earlier than the forward and ended no earlier."""
    lanes = {
        "GPU": (ln.LOG_HEAD, ln.LOG_DENSE, ln.LOG_HITS, ln.LOG_LANDED),
        "H2D": (ln.LOG_COPY, ln.LOG_PREFETCH),
        "CPU": (ln.LOG_CPU,),
        "D2H": (ln.LOG_OUT, ln.LOG_BACK),
    }
    busy = {"GPU": r.BUSY_GPU, "H2D": r.BUSY_H2D, "CPU": r.BUSY_CPU, "D2H": r.BUSY_D2H}
    for lane, kinds in lanes.items():
        spans = sorted((row[1], row[2]) for row in entries(case.outcome) if row[0] in kinds)
        assert all(begin <= end for begin, end in spans)
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert end <= begin, lane
        logged = sum(end - begin for begin, end in spans)
        given_up = lane == "H2D" and case.composition.prefetch != NoPrefetch()
        assert logged <= case.sums[busy[lane]] if given_up else logged == case.sums[busy[lane]]


def check_bound(case: Case) -> None:
    """No forward is faster than the relaxed bound, nor than with everything resident and no CPU."""
    if case.composition.dispatch.drops:
        return  # work that is not done needs no time
    found = references(case.steps, case.machine.tables(case.steps))
    took = case.outcome.tally.end_ns - case.outcome.tally.begin_ns
    assert (took >= found.bound_relaxed_ns).all()
    assert (found.bound_relaxed_ns <= found.ideal_ns).all()
    assert (found.all_resident_ns <= found.ideal_ns).all()


def check_budget(case: Case) -> None:
    """Residents and staged experts fit their room at every moment that a part can see."""
    if not case.bounded:
        return
    for seen in (*case.before, *case.after):
        assert (seen.resident.sum(axis=1) == seen.used).all()
        held = int((seen.resident.sum(axis=1) * case.steps.expert_bytes).sum())
        assert held == seen.resident_bytes
        if case.pooled:
            assert held <= seen.budget_bytes
        else:
            assert (seen.used <= seen.capacity).all()
            assert (seen.capacity * case.steps.expert_bytes).sum() <= seen.budget_bytes
        assert (seen.staged != 0).sum() == seen.staged_experts <= case.fields["staging"] - 1
        assert not (seen.capacity > case.steps.num_experts).any()
        assert not (seen.capacity < 0).any()


def check_decisions(case: Case) -> None:
    """Places fit states, who stays is who should, transfers are each expert once, losers first."""
    admission = case.composition.admission
    earlier = {seen.index: seen for seen in case.before}
    for seen in case.after:
        was = case.residents(seen.layer, earlier[seen.index].resident)
        new = set()
        for expert, state, place in zip(seen.expert, seen.state, seen.place, strict=True):
            if admission is not Admission.SEQUENTIAL:
                assert (state == RESIDENT) == (expert in was)
            assert place in ((ON_GPU, ON_CPU) if state != ABSENT else (TRANSFER, ON_CPU, DROPPED))
            if state != RESIDENT and place in (TRANSFER, ON_GPU):
                new.add(expert)
        copied = {e for e, place in zip(seen.expert, seen.place, strict=True) if place == TRANSFER}
        assert len(seen.order) == len(copied)
        assert set(seen.order) == copied
        stays = {e for e, s in zip(seen.expert, seen.stays, strict=True) if s}
        kept = [e in stays for e in seen.order]
        assert kept == sorted(kept)
        assert stays <= new
        if admission in (Admission.DEMAND, Admission.FROZEN):
            assert seen.evicted_active == 0  # evicted members of the active set
            assert not {e for la, e in seen.evicted if la == seen.layer} & set(seen.expert)
        if admission is not Admission.SEQUENTIAL and not case.pooled:
            _check_admission(case, seen, was, new, stays)


def _check_admission(case: Case, seen, was: set[int], new: set[int], stays: set[int]) -> None:
    """The residents of the layer afterwards, by sorting instead of selection."""
    layer, slots = seen.layer, int(seen.capacity[seen.layer])
    admission, active = case.composition.admission, set(seen.expert)
    by_score = sorted(was | new, key=lambda e: (seen.score[layer, e], seen.stamp[layer, e]))
    if admission is Admission.FROZEN:
        expected = was
    elif admission is Admission.COMPETE:
        expected = set(by_score[max(0, len(by_score) - slots) :])
    else:
        leave = [e for e in by_score if e not in active]
        if case.bounded:
            leave += [e for e in by_score if e in new]
        expected = (was | new) - set(leave[: max(0, len(by_score) - slots)])
    assert case.residents(layer, seen.resident) == expected
    assert stays == new & expected
    assert {e for la, e in seen.evicted if la == layer} == was - expected


def check_oracles(case: Case) -> None:
    """No atomic policy without prefetch has more hits than Belady with bypass in the same memory.

    A policy that begins with residents placed for it may hit each of them once more.
    """
    if case.composition.prefetch != NoPrefetch() or not case.bounded:
        return
    gifts = case.outcome.initial_residents
    if case.fields["lifecycle"] == "request":
        gifts *= np.unique(case.steps.request).size
    hits = case.sums[r.HITS]
    if np.unique(case.steps.expert_bytes).size == 1:
        best = replay(case.steps, load_composition("oracle_pooled"), case.machine, **case.fields)
        assert hits <= best.tally.by_phase[..., r.HITS].sum() + gifts
    if not case.pooled and type(case.composition.allocation) is Uniform:
        best = replay(case.steps, load_composition("oracle"), case.machine, **case.fields)
        assert hits <= best.tally.by_phase[..., r.HITS].sum() + gifts


@for_all_policies
def test_everything_holds(case):
    for check in (
        check_drivers,
        check_books,
        check_time,
        check_lanes,
        check_bound,
        check_budget,
        check_decisions,
        check_oracles,
    ):
        check(case)
