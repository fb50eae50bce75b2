"""Stages: what SAEM's parts hold, copy and compute, by hand or against a plain sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.policies.decide import classify_residency, touch
from oled.policies.dispatch.few_tokens import FewTokens
from oled.policies.interface import ABSENT, FILL, NEVER, ON_CPU, TRANSFER, Cache, Step
from oled.policies.prefetch.stage_refill import StageRefill
from oled.policies.retention.coming_stage import ComingStage, Stages
from oled.policies.retention.last_stage import LastStage
from oled.trace.schema import Phase
from tests.support.seeds import sized

from .build import (
    call,
    make_cache,
    make_costs,
    make_plan,
    make_queue,
    make_side,
    make_step,
    memory_of,
)


class Stage:
    """SAEM's parts on one layer of 6 experts with 3 slots; time stands still between steps."""

    def __init__(self, retention: Any = None, memory: Any = None, **cache: Any) -> None:
        prior = np.array([[0.4, 0.3, 0.2, 0.1, 0.0, 0.0]])
        self.cache = make_cache(experts=6, slots=3, resident={0: [0, 1, 2]}, prior=prior, **cache)
        self.retention = retention or LastStage()
        self.memory = memory_of(self.retention, self.cache) if memory is None else memory
        self.refill, self.queue = StageRefill(), make_queue()
        self.asked = memory_of(self.refill, self.cache)
        self.clock = 0

    def see(self, expert: list[int], count: list[int], block: int, **fields: Any) -> list[float]:
        """The scores after a step; `queued` then holds what the refill asks for."""
        self.clock += 1
        step = make_step(expert, count=count, block=block, clock=self.clock, **fields)
        touch(step, self.cache)
        call(self.retention.observe, step, self.cache, self.memory, self.retention.params())
        plan, costs = make_plan(experts=6), make_costs()
        classify_residency(step, self.cache, plan)
        rest = (costs, plan, make_side(experts=6), self.queue, self.asked, self.refill.params())
        call(self.refill.ask, step, self.cache, *rest)
        return self.cache.score[0].tolist()

    @property
    def queued(self) -> list[int]:
        span = slice(self.queue.begin, self.queue.end)
        assert (self.queue.kind[span] == FILL).all()
        assert (self.queue.due[span] == NEVER).all()
        return self.queue.expert[span].tolist()  # type: ignore[no-any-return]


def test_a_boundary_resets_to_the_busiest_of_the_finished_stage() -> None:
    """Slots 3. Block 0: 3 and 4 take 5 tokens each, 0 takes 2, 5 and 1 take 1 each.

    The prior held 0, 1, 2. At block 1: 3 and 4 (6.0 each) and 0 (3.0); 1 and 2, still resident,
    0.5.
    """
    stage = Stage()
    first = [1.4, 1.3, 1.2, 0.0, 0.0, 0.0]
    assert stage.see([0, 2], [9, 9], -1, phase=Phase.PREFILL) == first
    assert stage.see([3, 4, 5], [2, 5, 1], 0) == first
    assert stage.see([0, 1, 3], [2, 1, 3], 0) == first
    assert stage.queued == []
    assert stage.see([5], [7], 1) == [3.0, 0.5, 0.5, 6.0, 6.0, 0.0]
    assert stage.queued == [3, 4]  # equally busy: the one used last first
    stage.queue.begin += 1  # 3 is on its way
    assert stage.see([5], [7], 1) == [3.0, 0.5, 0.5, 6.0, 6.0, 0.0]
    assert stage.queued == [4]
    assert stage.see([1], [1], 2) == [1.0, 1.0, 0.5, 0.0, 0.0, 15.0]  # 5 alone was used in block 1
    assert stage.queued == [5]  # what was left of the old stage is dropped


def test_equally_busy_residents_are_held_before_others() -> None:
    """2 (resident) and 3 have a token each for the last slot: 2 stays although 3 was used later."""
    stage = Stage()
    stage.see([0, 1, 2], [3, 3, 1], 0)
    stage.see([3], [1], 0)
    assert stage.see([5], [1], 1) == [4.0, 4.0, 2.0, 0.0, 0.0, 0.0]
    assert stage.queued == []


def test_a_prompt_in_between_ends_a_stage_and_counts_for_none() -> None:
    """A second request without a reset: its prompt keeps the last stage's experts."""
    stage = Stage()
    stage.see([3, 4, 5], [1, 2, 3], 0)
    kept = [0.5, 0.5, 0.5, 2.0, 3.0, 4.0]
    assert stage.see([0], [99], -1, phase=Phase.PREFILL) == kept
    assert stage.see([0], [99], 0) == kept
    assert stage.see([1], [1], 1)[0] == 100.0


def test_the_oracle_holds_what_the_coming_stage_uses_most() -> None:
    """Stages of 4 and 2 tokens in one layer; their counts stand in the memory beforehand."""
    tokens = np.array([[[0, 0, 0, 2, 1, 1]], [[0, 2, 0, 0, 0, 0]]], np.float64)
    memory = Stages(tokens=tokens, coming=np.zeros(1), left=np.zeros(1))
    stage = Stage(ComingStage(), memory)
    assert stage.see([0], [9], -1, phase=Phase.PREFILL) == [0.4, 0.3, 0.2, 0.1, 0.0, 0.0]
    held = [0.5, 0.5, 0.5, 3.0, 2.0, 2.0]
    assert stage.see([3, 4], [2, 1], 0) == held
    assert stage.queued == [3, 4, 5]
    assert stage.see([5], [1], 0) == held
    assert stage.see([1], [1], 0) == [1.0, 3.0, 1.0, 0.0, 0.0, 0.0]  # the block number says nothing
    assert stage.see([1], [1], 0) == [1.0, 3.0, 1.0, 0.0, 0.0, 0.0]


def test_few_tokens_run_on_the_cpu_and_the_busiest_go_first() -> None:
    cache = make_cache(experts=8, slots=2, resident={0: [1, 6]})
    step = make_step([0, 1, 2, 3, 5], count=[2, 9, 3, 4, 3])
    plan = make_plan(experts=8)
    classify_residency(step, cache, plan)
    part = FewTokens(tokens=2)
    call(part.dispatch, step, cache, make_costs(), plan, memory_of(part, cache), part.params())
    missing = [i for i in range(5) if plan.state[i] == ABSENT]
    assert missing == [0, 2, 3, 4]
    assert [int(plan.place[i]) for i in missing] == [ON_CPU, TRANSFER, TRANSFER, TRANSFER]
    assert sorted(missing[1:], key=lambda i: (plan.rank[i], i)) == [3, 2, 4]


@pytest.mark.parametrize("part", [lambda: FewTokens(tokens=-1), lambda: StageRefill(chunks=0)])
def test_impossible_values_are_refused(part: Any) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        part()


@st.composite
def histories(draw: Any) -> tuple[int, list[tuple[int, dict[int, int]]]]:
    """Slots, and steps of one layer of 6 experts: (block, tokens per expert)."""
    steps, block = [], 0
    for _ in range(draw(st.integers(1, 12))):
        block += draw(st.integers(0, 1))
        active = draw(st.dictionaries(st.integers(0, 5), st.integers(1, 4), min_size=1, max_size=4))
        steps.append((block, active))
    return draw(st.integers(1, 6)), steps


@settings(max_examples=sized(60))
@given(histories())
def test_the_held_set_is_the_busiest_by_sorting(case: tuple[int, list[Any]]) -> None:
    """Against a plain sort: as many as there are slots, above all others, and the same all
    stage."""
    slots, steps = case
    resident = list(range(slots))
    cache: Cache = make_cache(experts=6, slots=slots, resident={0: resident})
    retention = LastStage()
    memory = memory_of(retention, cache)
    counts, running, held = dict.fromkeys(range(6), 0), None, set(resident)
    for clock, (block, active) in enumerate(steps, start=1):
        step: Step = make_step(
            sorted(active), count=[active[e] for e in sorted(active)], block=block, clock=clock
        )
        touch(step, cache)
        call(retention.observe, step, cache, memory, retention.params())
        if running is not None and block != running:
            order = sorted(
                range(6), key=lambda e: (-counts[e], e not in resident, -cache.stamp[0, e])
            )
            held, counts = set(order[:slots]), dict.fromkeys(range(6), 0)
        running = block
        for expert, tokens in active.items():
            counts[expert] += tokens
        score = cache.score[0]
        assert set(np.flatnonzero(score >= 1.0).tolist()) == held
        assert set(np.flatnonzero(score == 0.5).tolist()) == set(resident) - held
