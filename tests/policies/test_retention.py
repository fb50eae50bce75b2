"""Scores of every retention: worked by hand, or against a second, plain implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oled.policies.decide import touch
from oled.policies.interface import NEVER, Cache, Step
from oled.policies.part import Retention
from oled.policies.retention.belady import Belady
from oled.policies.retention.expert_count import ExpertCount
from oled.policies.retention.gate_sum import GateSum
from oled.policies.retention.in_cache_lfu import InCacheLfu
from oled.policies.retention.least_stale import LeastStale
from oled.policies.retention.lfu import Lfu
from oled.policies.retention.lrfu import Lrfu
from oled.policies.retention.lru import Lru
from oled.policies.retention.mrs import Mrs
from oled.policies.retention.priority import Priority
from oled.policies.retention.probability_visits import ProbabilityVisits
from oled.policies.retention.state_gate import StateGate
from oled.policies.retention.static_popularity import StaticPopularity
from oled.policies.retention.two_timescale import TwoTimescale
from oled.policies.retention.windowed import Windowed
from tests.support.seeds import sized

from .build import call, make_cache, make_step, memory_of

ALL = [
    Belady(),
    ExpertCount(),
    ExpertCount(smoothing=0.5),
    GateSum(smoothing=0.3),
    InCacheLfu(),
    LeastStale(),
    Lfu(),
    Lfu(decay=0.5, period=2),
    Lrfu(),
    Lru(),
    Mrs(top=3),
    Mrs(top=1, per_active=2.0),
    Priority(smoothing=0.3, opened_from_logits=True),
    ProbabilityVisits(),
    StateGate(smoothing=0.3),
    StaticPopularity(),
    TwoTimescale(),
    Windowed(window=2, swaps=2),
]


class Observer:
    """A retention with its memory, shown one layer-step after the other."""

    def __init__(self, part: Retention, cache: Cache) -> None:
        self.part, self.cache = part, cache
        self.memory = memory_of(part, cache)

    def see(self, step: Step) -> list[float]:
        """The layer's scores after the step, as in the engine: stamps first, then scores."""
        touch(step, self.cache)
        call(self.part.observe, step, self.cache, self.memory, self.part.params())
        return self.cache.score[step.layer].tolist()


def leaving(cache: Cache, layer: int, experts: Iterable[int]) -> list[int]:
    """Experts in the order in which they would leave."""
    return sorted(experts, key=lambda e: (cache.score[layer, e], cache.stamp[layer, e]))


def test_lru_ranks_by_last_use_and_never_used_residents_by_popularity() -> None:
    cache = make_cache(experts=5, prior=np.array([[0.1, 0.2, 0.05, 0.3, 0.35]]))
    lru = Observer(Lru(), cache)
    lru.see(make_step([1, 3], clock=1))
    lru.see(make_step([3, 4], clock=2))
    assert leaving(cache, 0, range(5)) == [2, 0, 1, 3, 4]


def test_lfu_counts_layer_steps_and_forgets_by_decay() -> None:
    lfu = Observer(Lfu(), make_cache(experts=3))
    lfu.see(make_step([0, 2], count=[5, 1]))
    assert lfu.see(make_step([2])) == [1.0, 0.0, 2.0]
    aged = Observer(Lfu(decay=0.5, period=2), make_cache(experts=3))
    aged.see(make_step([0, 2]))
    assert aged.see(make_step([2])) == [0.5, 0.0, 1.5]  # (1, 0, 1) halved, then counted
    assert aged.see(make_step([2])) == [0.5, 0.0, 2.5]
    assert aged.see(make_step([1])) == [0.25, 1.0, 1.25]


@given(
    uses=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=12),
    rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
@settings(max_examples=sized(30))
def test_lrfu_is_the_sum_of_faded_uses(uses: list[set[int]], rate: float) -> None:
    observer = Observer(Lrfu(rate=rate), make_cache(experts=5))
    for clock, active in enumerate(uses, 1):
        scores = observer.see(make_step(sorted(active), clock=clock))
    ages = {e: [len(uses) - 1 - t for t, u in enumerate(uses) if e in u] for e in range(5)}
    assert scores == pytest.approx([sum(0.5 ** (rate * a) for a in ages[e]) for e in range(5)])


@given(uses=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=12))
@settings(max_examples=sized(30))
def test_lrfu_ends_in_lfu_and_lru(uses: list[set[int]]) -> None:
    steps = [make_step(sorted(active), clock=c) for c, active in enumerate(uses, 1)]
    parts = {"lfu": Lfu(), "as_lfu": Lrfu(rate=0.0), "lru": Lru(), "as_lru": Lrfu(rate=1.0)}
    seen = {name: Observer(part, make_cache(experts=5)) for name, part in parts.items()}
    for step in steps:
        scores = {name: observer.see(step) for name, observer in seen.items()}
    assert scores["lfu"] == scores["as_lfu"]
    older = [(a, b) for a in range(5) for b in range(5) if scores["lru"][a] < scores["lru"][b]]
    assert all(scores["as_lru"][a] < scores["as_lru"][b] for a, b in older)


def test_expert_count_takes_the_tokens_of_this_forward() -> None:
    plain = Observer(ExpertCount(), make_cache(experts=4))
    assert plain.see(make_step([1, 3], count=[2, 5])) == [0, 2, 0, 5]
    assert plain.see(make_step([1], count=[4])) == [0, 4, 0, 0]
    smooth = Observer(ExpertCount(smoothing=0.5), make_cache(experts=4))
    smooth.see(make_step([1, 3], count=[2, 5]))
    assert smooth.see(make_step([1], count=[4])) == [0, 2.5, 0, 1.25]


def test_gate_sum_takes_the_gate_mass() -> None:
    gates = Observer(GateSum(smoothing=0.25), make_cache(experts=3))
    assert gates.see(make_step([0, 1], gate=[1.0, 0.5])) == [0.75, 0.375, 0]
    assert gates.see(make_step([1, 2], gate=[1.0, 2.0])) == [0.1875, 0.84375, 1.5]


def test_state_gate_weighs_opened_tokens_1_and_masked_ones_less() -> None:
    gate, gate_masked = [1.0, 0.5, 2.0], [1.0, 0.0, 0.5]
    step = make_step([0, 1, 2], gate=gate, gate_masked=gate_masked)
    scores = Observer(StateGate(masked=0.25), make_cache(experts=4)).see(step)
    assert scores == [0.25, 0.5, 1.625, 0]
    same = Observer(StateGate(masked=1.0), make_cache(experts=4)).see(step)
    assert same == Observer(GateSum(), make_cache(experts=4)).see(step)


def test_priority_is_confidence_times_gate() -> None:
    step = make_step(
        [0, 1],
        gate=[1.0, 2.0],
        gate_masked=[1.0, 0.5],
        conf_masked=[0.25, 0.125],
        conf_opened=[0.0, 1.25],
    )
    assert Observer(Priority(), make_cache(experts=2)).see(step) == [0.25, 1.625]
    from_logits = Priority(opened_from_logits=True, smoothing=0.5)
    assert Observer(from_logits, make_cache(experts=2)).see(step) == [0.125, 0.6875]


def test_two_timescale_ranks_the_idle_by_their_activity() -> None:
    observer = Observer(TwoTimescale(weight=0.5, keep=0.5), make_cache(experts=3))
    masks = {"gate_masked": [1.0, 1.0], "conf_masked": [0.5, 0.25]}
    assert observer.see(make_step([0, 1], **masks)) == [0.75, 0.5, 0]
    # activity 1/4, 3/4, 1/2; the priority only of the active
    assert observer.see(make_step([1, 2], **masks)) == [0.125, 0.875, 0.5]


def test_static_popularity_never_moves() -> None:
    cache = make_cache(experts=2, prior=np.array([[0.75, 0.25]]))
    observer = Observer(StaticPopularity(), cache)
    assert observer.see(make_step([1], count=[9])) == [0.75, 0.25]


def mrs_by_sorting(old: Any, scores: Any, alpha: float, kept: int) -> Any:
    best = np.argsort(-scores, kind="stable")[:kept]
    top = np.zeros_like(old)
    top[best] = scores[best]
    return alpha * top + (1 - alpha) * old


def test_mrs_by_hand() -> None:
    observer = Observer(Mrs(alpha=0.5, top=2), make_cache(experts=4))
    assert observer.see(make_step([0], scores=[0.5, 1.0, 0.25, 0.5])) == [0.25, 0.5, 0, 0]
    assert observer.see(make_step([0], scores=[0.0, 0.5, 0.0, 0.75])) == [0.125, 0.5, 0, 0.375]


@given(
    rows=st.lists(
        arrays(np.float32, 6, elements=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])),
        min_size=1,
        max_size=4,
    ),
    top=st.integers(1, 8),
    active=st.integers(1, 6),
    per_active=st.sampled_from([0.0, 1.0, 2.0]),
)
@settings(max_examples=sized(50))
def test_mrs_equals_an_implementation_by_sorting(
    rows: list[Any], top: int, active: int, per_active: float
) -> None:
    part = Mrs(alpha=0.25, top=top, per_active=per_active)
    observer = Observer(part, make_cache(experts=6))
    expected = np.zeros(6)
    for row in rows:
        kept = min(6, int(max(top, per_active * active)))
        expected = mrs_by_sorting(expected, row.astype(np.float64), 0.25, kept)
        scores = observer.see(make_step(list(range(active)), scores=row.tolist()))
        assert scores == pytest.approx(expected.tolist())


def test_in_cache_lfu_forgets_what_left() -> None:
    cache = make_cache(experts=3, resident={0: [0]})
    observer = Observer(InCacheLfu(), cache)
    assert observer.see(make_step([0, 1])) == [1, 1, 0]
    cache.resident[0] = [1, 1, 0]  # expert 1 was inserted
    assert observer.see(make_step([1, 2])) == [1, 2, 1]
    cache.resident[0] = [1, 0, 1]  # 1 was evicted for 2
    assert observer.see(make_step([0])) == [2, 0, 1]
    assert observer.see(make_step([1])) == [2, 1, 1]


def test_probability_visits_multiplies() -> None:
    cache = make_cache(experts=3, resident={0: [0]})
    observer = Observer(ProbabilityVisits(), cache)
    assert observer.see(make_step([0, 1], scores=[0.5, 0.25, 0.125])) == [0.5, 0.25, 0]
    cache.resident[0] = [1, 1, 0]
    assert observer.see(make_step([0], scores=[0.25, 0.5, 0.5])) == [0.5, 0.5, 0]
    cache.resident[0] = [1, 0, 0]
    assert observer.see(make_step([2], scores=[0.25, 0.5, 1.0])) == [0.5, 0, 1.0]


def test_windowed_exchanges_few_after_each_window() -> None:
    cache = make_cache(experts=5, resident={0: [0, 1, 2]})
    observer = Observer(Windowed(window=2, swaps=1), cache)
    assert observer.see(make_step([0, 3], count=[2, 3])) == [0] * 5
    # tokens 2, 0, 1, 3, 4: 4 takes the place of 1; 3 would be the next
    assert observer.see(make_step([2, 4], count=[1, 4])) == [3, 0, 2, 0, 5]
    assert observer.see(make_step([1, 3], count=[9, 9])) == [3, 0, 2, 0, 5]
    cache.resident[0] = [1, 0, 1, 0, 1]
    # tokens 0, 9, 0, 10, 0: 3 takes the place of 0
    assert observer.see(make_step([3])) == [0, 0, 1, 11, 1]
    cache.resident[0] = [0, 0, 1, 1, 1]
    observer.see(make_step([2, 3, 4], count=[3, 3, 3]))
    assert observer.see(make_step([0], count=[3])) == [0, 0, 4, 4, 4]  # no busier one: no exchange


def test_belady_keeps_the_next_to_be_used() -> None:
    observer = Observer(Belady(), make_cache(experts=3))
    scores = observer.see(make_step([0, 1], next_use=[7, NEVER]))
    assert scores[1] < scores[0] < 0


@given(data=st.data())
@settings(max_examples=sized(30))
def test_least_stale_orders_victims_as_defined(data: st.DataObject) -> None:
    """Untouched before touched, then the layer farthest ahead, then first in first out."""
    layers, experts = 3, 4
    cache = make_cache(layers=layers, experts=experts, slots=experts)
    observer = Observer(LeastStale(), cache)
    entered: dict[tuple[int, int], int] = {}
    touched: dict[tuple[int, int], int] = {}  # in which forward
    clock = 0
    for forward in range(data.draw(st.integers(1, 4))):
        for layer in range(layers):
            clock += 1
            active = sorted(data.draw(st.sets(st.integers(0, experts - 1), min_size=1)))
            observer.see(make_step(active, layer=layer, clock=clock, forward=forward))
            for e in active:
                touched[layer, e] = forward
                entered.setdefault((layer, e), clock)
                cache.resident[layer, e] = 1

            rank = {
                key: (touched.get(key) == forward, -((key[0] - layer - 1) % layers), entry)
                for key, entry in entered.items()
            }
            pairs = [(a, b) for a in rank for b in rank if rank[a] < rank[b]]
            assert all(cache.score[a] < cache.score[b] for a, b in pairs)
            for key in data.draw(st.sets(st.sampled_from(sorted(entered)))):
                del entered[key]
                cache.resident[key] = 0


@pytest.mark.parametrize("part", ALL, ids=repr)
def test_scores_are_finite_and_the_same_with_and_without_jit(part: Retention) -> None:
    rng = np.random.default_rng(0)
    layers, experts = 2, 12
    prior = rng.random((layers, experts))
    cache = make_cache(layers=layers, experts=experts, num_experts=[12, 7], prior=prior)
    observer = Observer(part, cache)
    for clock in range(1, 61):
        layer = (clock - 1) % layers
        most = int(cache.num_experts[layer])
        active = np.sort(rng.permutation(most)[: rng.integers(1, most + 1)])
        mass = rng.random((4, active.size), dtype=np.float32)
        step = make_step(
            active.tolist(),
            layer=layer,
            clock=clock,
            forward=(clock - 1) // layers,
            count=rng.integers(1, 9, active.size).tolist(),
            gate=(mass[0] + mass[1]).tolist(),
            gate_masked=mass[1].tolist(),
            conf_masked=(mass[1] * mass[2]).tolist(),
            conf_opened=(mass[0] * mass[3]).tolist(),
            next_use=(clock + rng.integers(1, 20, active.size)).tolist(),
            scores=rng.random(experts).tolist(),
        )
        before = cache.score.copy()
        observer.see(step)
        assert np.isfinite(cache.score).all()
        if not isinstance(part, LeastStale):  # the only one that looks at other layers
            other = 1 - layer
            np.testing.assert_array_equal(cache.score[other], before[other])
        cache.resident[layer, :most] = rng.random(most) < 0.5


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (ExpertCount, {"smoothing": 1.0}),
        (GateSum, {"smoothing": -0.1}),
        (Lfu, {"decay": 1.5}),
        (Lfu, {"period": 0}),
        (Lrfu, {"rate": 2.0}),
        (Mrs, {"alpha": 0.0}),
        (Mrs, {"top": 0}),
        (Mrs, {"per_active": -1.0}),
        (Priority, {"smoothing": 1.0}),
        (StateGate, {"masked": 1.1}),
        (StateGate, {"smoothing": 1.0}),
        (TwoTimescale, {"weight": -0.1}),
        (TwoTimescale, {"keep": 1.0}),
        (Windowed, {"window": 0}),
        (Windowed, {"swaps": -1}),
    ],
)
def test_wrong_hyper_parameters_are_refused_by_name(part: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        part(**wrong)


def test_parts_are_frozen() -> None:
    for part in ALL:
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            part.smoothing = 0.5  # type: ignore[attr-defined]
