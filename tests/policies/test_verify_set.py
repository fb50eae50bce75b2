"""DraftExpert's prefetch: what is asked for, and what becomes of it on the clock, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oled.errors import UserError
from oled.policies.composition import load_composition
from oled.policies.interface import FILL, NEVER, Cache, Queue, Step
from oled.policies.prefetch.verify_set import VerifySet
from oled.sim.api import simulate
from oled.sim.metrics import count_metrics
from oled.trace.schema import Phase
from tests.sim.build import Forward, Machine, compose, make_steps, replay

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

LAYERS = 2


class Asking:
    """A prefetcher that is asked at the last layer of drafts, forward after forward."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.part = cache, VerifySet()
        self.queue: Queue = make_queue()
        self.memory = memory_of(self.part, cache)

    def ask(
        self, forward: int, said: list[list[int]], phase: Phase = Phase.DRAFT, layer: int = 1
    ) -> None:
        step: Step = make_step(
            [0], layer=layer, phase=phase, forward=forward, clock=forward * LAYERS + layer + 1
        )
        rows = [[]] * (step.index * LAYERS) + said
        side = make_side([step], layers=LAYERS)._replace(
            pred_offsets=np.cumsum([0, *map(len, rows)]).astype(np.int64),
            pred_expert=np.array([e for row in rows for e in row], np.uint16),
            pred_score=np.ones(sum(map(len, rows)), np.float32),
            horizons=LAYERS,
        )
        rest: Any = (make_costs(layers=LAYERS), make_plan(layers=LAYERS), side, self.queue)
        call(self.part.ask, step, self.cache, *rest, self.memory, self.part.params())

    @property
    def asked(self) -> list[tuple[int, int]]:
        span = slice(self.queue.begin, self.queue.end)
        assert (self.queue.kind[span] == FILL).all()
        assert (self.queue.due[span] == NEVER).all()
        pairs = np.stack([self.queue.layer[span], self.queue.expert[span]], axis=1)
        return [(layer, expert) for layer, expert in pairs.tolist()]


def test_missing_experts_are_asked_for_layer_by_layer() -> None:
    """Resident ones are not, but count as used now."""
    asking = Asking(make_cache(layers=LAYERS, slots=4, resident={0: [3]}))
    asking.ask(5, [[3, 1], [6]])
    assert asking.asked == [(0, 1), (1, 6)]
    assert asking.cache.score[0, 3] == asking.cache.score[0, 1] == 12
    assert asking.cache.score[0, 0] == 0


def test_a_later_draft_of_the_same_set_adds_what_is_new_while_there_are_slots() -> None:
    """Three slots: 1 and 2, then 4; 5 has no place. In the next set there is place again."""
    asking = Asking(make_cache(layers=LAYERS, slots=3))
    asking.ask(0, [[1, 2], []])
    asking.cache.staged[0, [1, 2]] = 1  # on their way
    asking.queue.begin = asking.queue.end = 0
    asking.ask(1, [[2, 4, 5], []])
    assert asking.asked == [(0, 4)]
    asking.queue.begin = asking.queue.end = 0
    asking.ask(4, [[5], []])  # forwards 2 and 3: a draft that was given up, a verification
    assert asking.asked == [(0, 5)]


def test_what_has_not_begun_when_its_layer_is_routed_is_dropped() -> None:
    asking = Asking(make_cache(layers=LAYERS))
    asking.ask(0, [[1, 2], [3]])
    asking.ask(1, [], phase=Phase.VERIFY, layer=0)
    assert asking.asked == [(1, 3)]
    asking.ask(1, [], phase=Phase.VERIFY, layer=1)
    assert asking.asked == []


def test_a_draft_that_says_nothing_asks_for_nothing() -> None:
    asking = Asking(make_cache(layers=LAYERS))
    asking.ask(0, [[], []])
    asking.ask(0, [[1], [1]], layer=0)  # only the last layer speaks
    assert asking.asked == []


def outcome(copy: int, machine: Machine, predicted: list[int]) -> tuple[list[int], dict[str, Any]]:
    """A draft that runs expert 0, resident, in one layer, then its verification of 0, 1 and 2."""
    forwards = [
        Forward({0: {0: 1}}, phase=Phase.PREFILL),
        Forward({0: {0: 1}}, phase=Phase.DRAFT, produced=0),
        Forward({0: {0: 1, 1: 1, 2: 1}}, phase=Phase.VERIFY, tokens=3),
    ]
    offsets = np.array([0, 0, len(predicted), len(predicted)], np.int64)
    steps = make_steps(
        forwards,
        [4],
        pred_offsets=offsets,
        pred_expert=np.array(predicted, np.uint16),
        pred_score=np.ones(len(predicted), np.float32),
        horizons=1,
    )
    policy = compose("compete", prefetch=VerifySet())
    found = replay(steps, policy, machine, slots=3)
    return found.tally.end_ns.tolist(), count_metrics(found.tally.by_phase[:, Phase.VERIFY])


def test_copies_land_while_drafting_goes_on() -> None:
    """Prefill: dense 10, 37 copy, 7 group: 54. Draft: dense 10 + 4, hit 7, head 100: 175; copies
    from 68 on: 37 (the link was idle) and 30, landed at 135. Verification: dense 10, three hits
    5 + 6 = 11, head 100."""
    machine = Machine(head=100, draft=4)
    ends, found = outcome(30, machine, [1, 2])
    assert ends == [154, 154 + 14 + 7 + 100, 275 + 10 + 11 + 100]
    assert (found["hits"], found["accesses"], found["transfers"]) == (3, 3, 0)
    assert found["prefetch_bytes_useful"] == 200


def test_one_copy_is_waited_for_and_the_other_is_made_on_demand() -> None:
    """The draft ends at 54 + 14 + 7 = 75, the verification is routed at 85; expert 1 has been on
    the link since 68, until 105; expert 2, not begun, is copied on demand until 135. Hit 0 runs
    from 85 to 92, 1 from 105 to 112, 2 from 135 to 142."""
    ends, found = outcome(30, Machine(draft=4), [1, 2])
    assert ends == [54, 75, 142]
    assert (found["hits"], found["late_prefetches"], found["transfers"]) == (1, 1, 1)
    assert found["prefetch_bytes_late"] == 100


def test_what_was_wrong_is_billed() -> None:
    """Expert 3 was copied for nothing; 1 and 2 are loaded on demand."""
    _, found = outcome(30, Machine(head=100), [3])
    assert (found["hits"], found["transfers"]) == (1, 2)
    assert found["prefetch_bytes_useful"] == 0
    assert found["prefetch_bytes_wasted"] == 100


def test_a_trace_without_drafts_is_refused() -> None:
    with pytest.raises(UserError, match="decode=speculative_blocks"):
        simulate("demo", "draftexpert", slots=20)
    assert load_composition("draftexpert").predictor == "draft"
