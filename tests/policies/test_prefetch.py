"""Prefetch: what each part asks for, worked by hand or by a second, plain implementation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oled.policies.decide import classify_residency
from oled.policies.interface import (
    COPYING,
    FILL,
    HOLD,
    ON_CPU,
    STAGED,
    Cache,
    Plan,
    Queue,
    Side,
    Step,
)
from oled.policies.kernel import NoMemory
from oled.policies.part import Prefetch
from oled.policies.prefetch.activation_match import ActivationMatch
from oled.policies.prefetch.dial import Dial
from oled.policies.prefetch.fill import IdleFill
from oled.policies.prefetch.next_gate import NextGate
from oled.policies.prefetch.next_scores import NextScores
from oled.policies.prefetch.none import NoPrefetch
from oled.policies.prefetch.queue import push
from oled.policies.prefetch.stride import Stride
from oled.policies.prefetch.trajectory_match import TrajectoryMatch
from tests.support.seeds import for_each_seed, sized

from .build import call, make_cache, make_costs, make_plan, make_queue, make_side, make_step

EXPERTS = 8
Asked = tuple[int, int, int, int, int]  # layer, expert, kind, due, chunks


def entries(queue: Queue) -> list[Asked]:
    span = slice(queue.begin, queue.end)
    columns = (queue.layer, queue.expert, queue.kind, queue.due, queue.chunks)
    return list(zip(*(column[span].tolist() for column in columns), strict=True))


class Asker:
    """A prefetcher with its memory and its queue, shown one layer-step after the other."""

    def __init__(self, part: Prefetch, cache: Cache, side: Side, room: int = 64) -> None:
        self.part, self.cache, self.side = part, cache, side
        self.memory = part.memory(*cache.resident.shape)
        self.queue = make_queue(room)

    def ask(self, step: Step, on_cpu: Sequence[int] = ()) -> list[Asked]:
        """What is queued after `step`, whose experts `on_cpu` run on the CPU."""
        plan = make_plan(layers=self.cache.resident.shape[0], experts=EXPERTS)
        classify_residency(step, self.cache, plan)
        for i, expert in enumerate(step.expert):
            plan.place[i] = ON_CPU if expert in on_cpu else plan.place[i]
        self._call(step, plan)
        return entries(self.queue)

    def _call(self, step: Step, plan: Plan) -> None:
        costs = make_costs(layers=self.cache.resident.shape[0])
        state = (step, self.cache, costs, plan, self.side, self.queue, self.memory)
        call(self.part.ask, *state, self.part.params())


def passes(routing: Sequence[Sequence[Sequence[int]]], **fields: Any) -> list[Step]:
    """The layer-steps of forwards: `routing[forward][layer]` are expert ids."""
    steps = []
    for forward, layers in enumerate(routing):
        for layer, experts in enumerate(layers):
            clock = len(steps) + 1
            steps.append(
                make_step(experts, layer=layer, forward=forward, clock=clock, tokens=8, **fields)
            )
    return steps


def predicting(side: Side, horizons: int, said: dict[tuple[int, int], Sequence[int]]) -> Side:
    """`side` with predictions: said[step, ahead] are expert ids, most wanted first."""
    rows = [said.get((s, h), ()) for s in range(side.layer.size) for h in range(1, horizons + 1)]
    return side._replace(
        pred_offsets=np.cumsum([0, *map(len, rows)]),
        pred_expert=np.array([e for row in rows for e in row], np.uint16),
        pred_score=np.array([1.0 for row in rows for _ in row], np.float32),
        horizons=horizons,
    )


# --- the queue ------------------------------------------------------------------------------------


def test_a_full_queue_moves_to_the_front_and_then_refuses() -> None:
    queue = make_queue(room=3)
    for expert in range(3):
        assert push(queue, 0, expert, HOLD, 9, 1)
    assert not push(queue, 0, 3, HOLD, 9, 1)
    queue.begin = 2
    assert push(queue, 1, 4, FILL, 8, 2)
    assert entries(queue) == [(0, 2, HOLD, 9, 1), (1, 4, FILL, 8, 2)]
    assert push(queue, 1, 5, HOLD, 8, 1)
    assert not push(queue, 1, 6, HOLD, 8, 1)
    assert (queue.begin, queue.end) == (0, 3)


@given(st.lists(st.integers(-3, 5), max_size=40))
def test_the_queue_is_a_bounded_first_in_first_out(moves: list[int]) -> None:
    queue, model = make_queue(room=5), []
    for number, move in enumerate(moves):
        if move < 0:  # the clock takes some
            taken = min(-move, len(model))
            queue.begin += taken
            del model[:taken]
        elif push(queue, 0, number, HOLD, 0, 1):
            model.append(number)
        else:
            assert len(model) == 5
        assert [expert for _, expert, *_ in entries(queue)] == model


# --- predictions recorded in the trace ------------------------------------------------------------


def test_none_asks_for_nothing() -> None:
    steps = passes([[[1], [2]]])
    assert Asker(NoPrefetch(), make_cache(layers=2), make_side(steps)).ask(steps[0]) == []


def test_next_gate_nearest_layer_first_and_nothing_that_is_there() -> None:
    steps = passes([[[1], [2], [3]], [[1], [2], [3]]])
    side = predicting(
        make_side(steps),
        2,
        {(0, 1): [6, 2, 5, 4], (0, 2): [7, 1], (1, 1): [3, 0], (2, 1): [5], (3, 1): [2]},
    )
    cache = make_cache(layers=3, resident={1: [2]})
    cache.staged[1, 5] = COPYING
    both = Asker(NextGate(horizon=2), cache, side)
    ahead = [(1, 6, HOLD, 1, 1), (1, 4, HOLD, 1, 1), (2, 7, HOLD, 2, 1), (2, 1, HOLD, 2, 1)]
    assert both.ask(steps[0]) == ahead
    assert both.ask(steps[1]) == [(2, 3, HOLD, 2, 1), (2, 0, HOLD, 2, 1)]  # written anew
    assert both.ask(steps[2]) == []  # the next layer-step is another forward's
    assert both.ask(steps[3]) == []
    assert Asker(NextGate(horizon=1, width=2), cache, side).ask(steps[0]) == ahead[:1]
    assert Asker(NextGate(horizon=9), cache, side).ask(steps[0]) == ahead  # two were recorded


def test_next_gate_knows_where_a_layer_has_no_step() -> None:
    """A forward without its middle layer: what is predicted for that one is not asked for."""
    steps = [make_step([1], layer=0, clock=1), make_step([2], layer=2, clock=2)]
    side = predicting(make_side(steps), 2, {(0, 1): [5], (0, 2): [6]})
    asker = Asker(NextGate(horizon=2), make_cache(layers=3), side)
    assert asker.ask(steps[0]) == [(2, 6, HOLD, 1, 1)]


def test_stride_looks_past_the_next_layer_and_adds_to_the_queue() -> None:
    steps = passes([[[1], [2], [3], [4]]])
    side = predicting(make_side(steps), 2, {(0, 1): [1], (0, 2): [6, 7], (1, 2): [5], (2, 1): [4]})
    asker = Asker(Stride(stride=2, chunks=4), make_cache(layers=4), side)
    first = [(2, 6, HOLD, 2, 4), (2, 7, HOLD, 2, 4)]
    assert asker.ask(steps[0]) == first
    assert asker.ask(steps[1]) == [*first, (3, 5, HOLD, 3, 4)]
    assert asker.ask(steps[2]) == [*first, (3, 5, HOLD, 3, 4)]
    assert Asker(Stride(stride=3), make_cache(layers=4), side).ask(steps[0]) == []
    narrow = Asker(Stride(width=1), make_cache(layers=4), side)
    assert narrow.ask(steps[0]) == [(2, 6, HOLD, 2, 3)]


def test_next_scores_are_the_next_layers_own() -> None:
    steps = passes([[[1], [2]]])
    cache = make_cache(layers=2, resident={1: [7]})
    cache.score[1] = [0.0, 5.0, 1.0, 5.0, 0.0, 0.0, 0.0, 9.0]
    cache.stamp[1] = [0, 1, 2, 3, 4, 5, 6, 7]
    asker = Asker(NextScores(width=3), cache, make_side(steps))
    assert asker.ask(steps[0]) == [(1, 3, HOLD, 1, 1), (1, 1, HOLD, 1, 1)]  # 7 is there
    assert asker.ask(steps[1]) == []
    assert len(Asker(NextScores(), cache, make_side(steps)).ask(steps[0])) == 1  # top-2 less 7


# --- the dial -------------------------------------------------------------------------------------


def test_a_perfect_dial_names_what_comes() -> None:
    steps = passes([[[1, 2], [3, 4, 5]], [[0, 2], [6]]])
    cache = make_cache(layers=2, resident={1: [4]})
    asker = Asker(Dial(precision=1.0, recall=1.0), cache, make_side(steps))
    assert asker.ask(steps[0]) == [(1, 3, HOLD, 1, 1), (1, 5, HOLD, 1, 1)]
    assert asker.ask(steps[1])[2:] == [(0, 0, HOLD, 2, 1), (0, 2, HOLD, 2, 1)]  # the next forward
    assert len(asker.ask(steps[3])) == 4  # the run ends
    two = Asker(Dial(precision=1.0, recall=1.0, ahead=2), cache, make_side(steps))
    assert two.ask(steps[1]) == [(1, 6, HOLD, 3, 1)]


def test_a_dial_stops_at_the_end_of_a_request() -> None:
    steps = passes([[[1]], [[2]]])
    side = make_side(steps)._replace(forward_request=np.array([0, 1]))
    assert Asker(Dial(), make_cache(), side).ask(steps[0]) == []


@pytest.mark.parametrize(("precision", "recall"), [(0.38, 0.5), (0.8, 0.9), (1.0, 0.2)])
def test_a_dial_keeps_its_promise(precision: float, recall: float) -> None:
    rng = np.random.default_rng(0)
    routing = [[sorted(rng.choice(EXPERTS, 2, replace=False).tolist())] for _ in range(1500)]
    steps = passes(routing)
    asked, right, active = 0, 0, 0
    part = Dial(precision=precision, recall=recall)
    cache, side, queue = make_cache(), make_side(steps), make_queue()
    plan, memory, costs = make_plan(), NoMemory(), make_costs()
    for step, then in itertools.pairwise(steps):
        queue.begin = queue.end = 0
        part.ask(step, cache, costs, plan, side, queue, memory, part.params())
        said = [expert for _, expert, *_ in entries(queue)]
        asked += len(said)
        right += len(set(said) & set(then.expert.tolist()))
        active += then.expert.size
    assert right / active == pytest.approx(recall, abs=0.03)
    assert right / asked == pytest.approx(precision, abs=0.03)


def test_a_dial_depends_on_the_seed_and_nothing_else() -> None:
    steps = passes([[[1, 2, 3, 4]]] * 20)
    side = make_side(steps)

    def said(seed: int) -> list[list[Asked]]:
        asker = Asker(Dial(precision=0.5, recall=0.5), make_cache(), side._replace(seed=seed))
        return [asker.ask(step) for step in reversed(steps)]

    assert said(1) == said(1)
    assert said(1) != said(2)
    assert said(2**40) == said(2**40)


# --- idle-link fill -------------------------------------------------------------------------------


def test_fill_asks_for_the_cpus_experts_that_would_win_a_place() -> None:
    steps = passes([[[1, 2, 3, 4], [5]], [[1], [5]]])
    cache = make_cache(layers=2, slots=3, resident={0: [0, 6, 7]})
    cache.score[0] = [3.0, 4.0, 9.0, 1.0, 2.0, 0.0, 8.0, 0.5]
    asker = Asker(IdleFill(chunks=2), cache, make_side(steps))
    # Of residents 0, 6, 7 and the CPU's 1, 2, 3 the best three are 2, 6 and 1.
    assert asker.ask(steps[0], on_cpu=[1, 2, 3]) == [(0, 2, FILL, 2, 2), (0, 1, FILL, 2, 2)]
    assert len(asker.ask(steps[1])) == 2  # nothing on the CPU
    assert len(asker.ask(steps[2], on_cpu=[1])) == 2  # layer 0 does not come again


def test_fill_skips_what_is_on_its_way_and_residents_computed_on_the_cpu() -> None:
    steps = passes([[[1, 2, 3]], [[1]]])
    cache = make_cache(slots=4, resident={0: [1]})
    cache.staged[0, 2] = STAGED
    assert Asker(IdleFill(), cache, make_side(steps)).ask(steps[0], on_cpu=[1, 2, 3]) == [
        (0, 3, FILL, 1, 1)
    ]


def test_fill_stops_at_the_end_of_a_request() -> None:
    steps = passes([[[1]], [[1]]])
    side = make_side(steps)._replace(forward_request=np.array([0, 1]))
    assert Asker(IdleFill(), make_cache(), side).ask(steps[0], on_cpu=[1]) == []


# --- matches --------------------------------------------------------------------------------------


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    norm = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / norm if norm else 0.0


def store_of(seed: int, past: int, layers: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, (past, layers, EXPERTS)) * rng.integers(
        0, 2, (past, layers, EXPERTS)
    )
    return counts / np.maximum(counts.sum(axis=2, keepdims=True), 1)


def random_passes(seed: int, forwards: int, layers: int) -> list[Step]:
    rng = np.random.default_rng(seed)
    steps = []
    for index in range(forwards * layers):
        active = sorted(rng.choice(EXPERTS, int(rng.integers(1, 5)), replace=False).tolist())
        count = rng.integers(1, 6, len(active)).tolist()
        where = {"layer": index % layers, "forward": index // layers, "clock": index + 1}
        steps.append(make_step(active, count=count, tokens=8, **where))
    return steps


def random_residents(seed: int, layers: int) -> Cache:
    rng = np.random.default_rng(seed)
    resident = {layer: rng.choice(EXPERTS, 3, replace=False).tolist() for layer in range(layers)}
    return make_cache(layers=layers, experts=EXPERTS, resident=resident)


def shares(step: Step) -> NDArray[np.float64]:
    row = np.zeros(EXPERTS)
    row[step.expert] = step.count / step.count.sum()
    return row


@for_each_seed(8)
def test_activation_match_agrees_with_a_plain_one(seed: int) -> None:
    layers, depth = 4, 6
    store, cache = store_of(seed, 5, layers), random_residents(seed, layers)
    steps = random_passes(seed, 3, layers)
    side = make_side(steps)._replace(store=store)
    asker = Asker(ActivationMatch(depth=depth), cache, side)
    matrix = np.zeros((layers, EXPERTS))
    for step in steps:
        matrix[step.layer, step.expert] += step.count
        match = [sum(cosine(matrix[n], past[n]) for n in range(layers)) for past in store]
        best = store[int(np.argmax(match))]
        wanted = sorted(
            (
                (-best[n, e] * (1 - (n - step.layer) / (layers + 1)), n, e)
                for n in range(step.layer + 1, layers)
                for e in range(EXPERTS)
                if best[n, e] > 0 and not cache.resident[n, e]
            ),
        )[:depth]
        asked = asker.ask(step)
        assert [entry[3] for entry in asked] == [step.index + n - step.layer for _, n, _ in wanted]
        assert [entry[:2] for entry in asked] == [(n, e) for _, n, e in wanted]


def test_activation_match_worked_by_hand() -> None:
    store = np.zeros((2, 3, EXPERTS))
    store[0, :, 1] = 1.0  # one past request used expert 1 alone
    store[1, 0, 2] = store[1, 1, 3] = 1.0  # the other 2, then 3, then 4 and 5
    store[1, 2, [4, 5]] = 0.5
    steps = passes([[[2], [3], [4]]])
    asker = Asker(ActivationMatch(), make_cache(layers=3), make_side(steps)._replace(store=store))
    # Layer 1 has 1 * (1 - 1/4), layer 2 0.5 * (1 - 2/4).
    assert asker.ask(steps[0]) == [(1, 3, HOLD, 1, 1), (2, 4, HOLD, 2, 1), (2, 5, HOLD, 2, 1)]
    assert asker.ask(steps[1]) == [(2, 4, HOLD, 2, 1), (2, 5, HOLD, 2, 1)]
    assert asker.ask(steps[2]) == []


@for_each_seed(8)
def test_trajectory_match_agrees_with_a_plain_one(seed: int) -> None:
    layers, distance, least = 5, 2, 2
    store, cache = store_of(seed, 4, layers), random_residents(seed, layers)
    steps = random_passes(seed, 3, layers)
    side = make_side(steps)._replace(store=store)
    asker = Asker(TrajectoryMatch(distance=distance, least=least), cache, side, room=400)
    seen, match, best = np.zeros((layers, EXPERTS)), -1.0, None
    expected: list[tuple[int, int]] = []

    def fetch(layer: int) -> None:
        if best is None:
            return
        mass, taken = 0.0, 0
        for e in sorted(range(EXPERTS), key=lambda e: -best[layer, e]):
            if best[layer, e] == 0 or (taken >= least and mass >= min(1.0, max(0.0, 1.0 - match))):
                break
            if not cache.resident[layer, e]:
                expected.append((layer, e))
            mass, taken = mass + best[layer, e], taken + 1

    for step in steps:
        if step.layer == 0:
            for layer in range(1, distance):
                fetch(layer)
            seen[:] = 0.0
        seen[step.layer] = shares(step)
        now = step.layer + 1
        scores = [cosine(seen[:now], past[:now]) for past in store]
        match, best = max(scores), store[int(np.argmax(scores))]
        if step.layer + distance < layers:
            fetch(step.layer + distance)
        assert [entry[:2] for entry in asker.ask(step)] == expected


def test_a_perfect_trajectory_fetches_the_least_and_a_poor_one_more() -> None:
    store = np.zeros((1, 2, EXPERTS))
    store[0, 0, [0, 1]] = 0.5
    store[0, 1, [2, 3, 4, 5]] = [0.4, 0.3, 0.2, 0.1]
    part = TrajectoryMatch(distance=1, least=1)
    for active, fetched in (([0, 1], [2]), ([0], [2]), ([0, 6, 7], [2, 3]), ([6], [2, 3, 4, 5])):
        steps = passes([[active, [2]]])
        side = make_side(steps)._replace(store=store)
        asked = Asker(part, make_cache(layers=2), side).ask(steps[0])
        assert [expert for _, expert, *_ in asked] == fetched


# --- all of them ----------------------------------------------------------------------------------

ALL = [
    ActivationMatch(),
    Dial(precision=0.4, recall=0.9),
    IdleFill(),
    NextGate(horizon=3),
    NextScores(),
    Stride(),
    TrajectoryMatch(distance=2),
]


@pytest.mark.parametrize("part", ALL, ids=repr)
@given(seed=st.integers(0, 10_000), room=st.sampled_from([1, 3, 64]))
@settings(max_examples=sized(15))
def test_only_what_is_missing_and_still_comes_is_asked_for(
    part: Prefetch, seed: int, room: int
) -> None:
    layers = 4
    rng = np.random.default_rng(seed)
    steps, cache = random_passes(seed, 3, layers), random_residents(seed, layers)
    cache.staged[:] = rng.integers(0, 2, cache.staged.shape) * rng.integers(0, 4)
    cache.staged[cache.resident > 0] = 0
    said = {(s, h): rng.permutation(EXPERTS)[:3].tolist() for s in range(12) for h in (1, 2)}
    side = predicting(make_side(steps)._replace(store=store_of(seed, 3, layers)), 2, said)
    asker = Asker(part, cache, side, room=room)
    for step in steps:
        asker.queue.begin = asker.queue.end = 0
        for layer, expert, kind, due, chunks in asker.ask(step, on_cpu=step.expert.tolist()):
            assert not cache.resident[layer, expert]
            assert cache.staged[layer, expert] == 0
            assert due > step.index
            assert side.layer[due] == layer
            assert kind == (FILL if isinstance(part, IdleFill) else HOLD)
            assert chunks >= 1


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (ActivationMatch, {"depth": 0}),
        (Dial, {"precision": 0.0}),
        (Dial, {"recall": 1.1}),
        (Dial, {"ahead": 0}),
        (IdleFill, {"chunks": 0}),
        (NextGate, {"horizon": 0}),
        (NextScores, {"width": -1}),
        (Stride, {"stride": 0}),
        (Stride, {"chunks": 0}),
        (TrajectoryMatch, {"distance": 0}),
        (TrajectoryMatch, {"least": -1}),
    ],
)
def test_wrong_values_are_refused_by_name(part: Any, values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        part(**values)
