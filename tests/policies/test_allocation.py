"""Slots of the layers: budgets kept, bounds held, values worked by hand or by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.policies.allocation.front_loaded import FrontLoaded
from oled.policies.allocation.layer_adapt import LayerAdapt
from oled.policies.allocation.marginal_gain import MarginalGain, fit_falling
from oled.policies.allocation.uniform import Uniform
from oled.policies.apportion import hand_out
from oled.policies.decide import touch
from oled.policies.interface import Cache
from oled.policies.part import Allocation
from oled.trace.schema import Phase
from tests.support.seeds import sized

from .build import call, in_python, make_at, make_cache, make_step, memory_of

PHASES = [Phase.PREFILL, Phase.DENOISE, Phase.COMMIT, Phase.DECODE]


class Watcher:
    """An allocation with its memory, shown forwards and layer-steps."""

    def __init__(self, part: Allocation, cache: Cache) -> None:
        self.part, self.cache = part, cache
        self.memory = memory_of(part, cache)

    def forward(
        self, active: dict[int, list[int]], phase: Phase = Phase.DENOISE, clock: int = 1
    ) -> list[int]:
        """Begin a forward, then watch each layer's active experts; the slots that it ran with."""
        params = self.part.params()
        call(self.part.allocate, make_at(phase=phase), self.cache, self.memory, params)
        for layer, experts in active.items():
            step = make_step(experts, layer=layer, phase=phase, clock=clock + layer)
            call(self.part.watch, step, self.cache, self.memory, params)
            touch(step, self.cache)
        return self.cache.capacity.tolist()


def dealt(gain: Any, bounds: Any, size: list[int], budget: int) -> list[int]:
    slots = np.zeros(len(size), np.int64)
    hand_out(
        np.array(gain, np.float64),
        *(np.array(bound, np.float64) for bound in zip(*bounds, strict=True)),
        np.array(size, np.int64),
        float(budget),
        slots,
    )
    return slots.tolist()


def test_slots_are_handed_out_one_by_one() -> None:
    gain = [[5, 3, 1], [4, 2, 0]]
    free = [[0, 3], [0, 3]]
    assert dealt(gain, free, [1, 1], 3) == [2, 1]
    assert dealt(gain, [[0, 1], [0, 3]], [1, 1], 3) == [1, 2]  # the highest number holds
    assert dealt(gain, [[0, 3], [2, 3]], [1, 1], 3) == [1, 2]  # and the lowest
    assert dealt(gain, free, [2, 1], 3) == [1, 1]  # what does not fit goes to the other
    assert dealt(gain, free, [1, 1], 9) == [3, 3]
    assert dealt(np.zeros((3, 4)), [[0, 4]] * 3, [1, 1, 1], 7) == [3, 2, 2]  # ties


def test_uniform_leaves_the_even_share() -> None:
    even = np.array([4, 4, 3])
    assert Uniform().initial(even, np.array([8, 8, 3]), np.ones(3, np.int64)) is even


def front_loaded(slope: float, even: list[int], experts: list[int], size: list[int]) -> list[int]:
    arrays = (np.array(values, np.int64) for values in (even, experts, size))
    return FrontLoaded(slope).initial(*arrays).tolist()


def test_front_loaded_falls_along_a_line() -> None:
    assert front_loaded(0.5, [4, 4, 4], [8, 8, 8], [1, 1, 1]) == [6, 4, 2]
    assert front_loaded(0.0, [4, 4, 4], [8, 8, 8], [1, 1, 1]) == [4, 4, 4]
    assert front_loaded(1.0, [4, 4, 4], [6, 8, 8], [1, 1, 1]) == [6, 5, 1]  # wanted 8, 4, 0
    assert front_loaded(0.5, [4], [8], [1]) == [4]
    assert front_loaded(0.5, [0, 0], [8, 8], [1, 1]) == [0, 0]


@given(
    layers=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6
    ),
    slope=st.floats(0.0, 1.0),
)
def test_front_loaded_keeps_the_bytes(layers: list[tuple[int, int, int]], slope: float) -> None:
    experts = np.array([e for e, _, _ in layers])
    even = np.minimum([s for _, s, _ in layers], experts)
    size = np.array([b for _, _, b in layers])
    slots = np.array(front_loaded(slope, even.tolist(), experts.tolist(), size.tolist()))
    assert (slots >= 0).all()
    assert (slots <= experts).all()
    unused = int((even - slots) @ size)
    assert unused >= 0
    assert unused < size[slots < experts].min(initial=unused + 1)
    if len(set(size.tolist())) == 1:
        assert slots.sum() == even.sum()


def test_layer_adapt_by_hand() -> None:
    cache = make_cache(layers=2, experts=8, slots=4, resident={0: [0, 1, 2], 1: [7]})
    watcher = Watcher(LayerAdapt(period=1, smoothing=0.0, change=1.0), cache)
    routed = {0: [0, 1, 2, 3, 4, 5], 1: [6, 7]}
    assert watcher.forward(routed) == [4, 4]
    # demand 6 and 2, hits per slot 3/4 and 1/4: 9 to 1 of 8 slots is 7.2 to 0.8; the floor is 1
    assert watcher.forward(routed) == [7, 1]
    # 6 * 3/7 to 2 * 1/1 is 4.5 to 3.5: equal remainders, so the layer with fewer slots
    assert watcher.forward({}) == [4, 4]


def test_layer_adapt_changes_little_by_little() -> None:
    cache = make_cache(layers=2, experts=40, slots=20, resident={0: range(20)})
    watcher = Watcher(LayerAdapt(period=1, smoothing=0.0, floor=0.25, change=0.1), cache)
    slots = [watcher.forward({0: list(range(20)), 1: [0]}) for _ in range(10)]
    assert [first for first, _ in slots] == [20, 22, 24, 26, 28, 30, 32, 34, 35, 35]
    assert all(sum(both) == 40 for both in slots)


def test_layer_adapt_smooths_over_periods() -> None:
    cache = make_cache(layers=2, experts=16, slots=8, resident={0: range(8), 1: range(8)})
    watcher = Watcher(LayerAdapt(period=1, smoothing=0.75, floor=0.0, change=1.0), cache)
    eight, two = list(range(8)), [0, 1]
    watcher.forward({0: eight, 1: eight})
    assert watcher.forward({0: eight, 1: two}) == [8, 8]
    # demand 8 and 3/4 * 8 + 1/4 * 2 = 6.5, effect 1 and 3/4 + 1/4 * 1/4 = .8125: 9.64 to 6.36
    assert watcher.forward({}) == [10, 6]


@pytest.mark.parametrize("part", [LayerAdapt(change=1.0), MarginalGain()], ids=repr)
def test_refreshes_come_every_five_denoising_forwards_commits_not_counted(part: Allocation) -> None:
    cache = make_cache(layers=2, experts=8, slots=4, resident={0: [0, 1, 2, 3]})
    watcher = Watcher(part, cache)
    routed = {0: [0, 1, 2, 3, 4, 5], 1: [0]}
    seen = []
    for clock in range(1, 40, 3):
        phase = Phase.COMMIT if clock % 9 == 1 else Phase.DENOISE
        seen.append((phase, watcher.forward(routed, phase, clock)))
    watcher.forward(routed, Phase.PREFILL)
    denoising = [slots for phase, slots in seen if phase is Phase.DENOISE]
    assert denoising[:5] == [[4, 4]] * 5
    assert denoising[5] != [4, 4]
    commits = [i for i, (phase, _) in enumerate(seen) if phase is Phase.COMMIT and i > 0]
    assert all(seen[i][1] == seen[i - 1][1] for i in commits)


def test_only_denoising_and_decoding_are_watched() -> None:
    for part in (LayerAdapt(), MarginalGain()):
        cache = make_cache(layers=1, experts=4)
        touch(make_step([0, 1]), cache)
        for phase in PHASES:
            watcher = Watcher(part, cache)
            call(part.watch, make_step([0, 1], phase=phase), cache, watcher.memory, part.params())
            assert watcher.memory.cells.any() == (phase in (Phase.DENOISE, Phase.DECODE))


@given(data=st.data())
@settings(max_examples=sized(30))
@pytest.mark.parametrize("kind", [LayerAdapt, MarginalGain])
def test_budget_floor_and_change_hold(kind: type[LayerAdapt | MarginalGain], data: Any) -> None:
    layers = data.draw(st.integers(1, 4))
    experts = [data.draw(st.integers(1, 8)) for _ in range(layers)]
    start = [data.draw(st.integers(0, e)) for e in experts]
    one_size = data.draw(st.booleans())
    size = [3] * layers if one_size else [data.draw(st.integers(1, 5)) for _ in range(layers)]
    floor, change = data.draw(st.floats(0, 1)), 8.0
    options = {"period": 2, "floor": floor}
    if kind is LayerAdapt:
        change = options["change"] = data.draw(st.floats(0, 1))
    part = kind(**options)
    cache = make_cache(
        layers=layers, experts=8, slots=start, num_experts=experts, expert_bytes=size
    )
    watcher = Watcher(part, cache)
    before = start
    for clock in range(1, 60, 6):
        routed = {
            layer: sorted(data.draw(st.sets(st.integers(0, e - 1), min_size=1)))
            for layer, e in enumerate(experts)
        }
        phase = data.draw(st.sampled_from(PHASES))
        slots = watcher.forward(routed, phase, clock)
        for layer in range(layers):
            assert np.ceil(floor * start[layer]) <= slots[layer] <= experts[layer]
            most = max(1, int(change * max(start[layer], 1)))
            assert abs(slots[layer] - before[layer]) <= most
            cache.resident[layer, : experts[layer]] = 0
            cache.resident[layer, : slots[layer]] = 1
        if one_size:
            assert sum(slots) == sum(start)
        assert np.dot(slots, size) <= np.dot(start, size)
        before = slots


def test_ranks_follow_score_then_recency() -> None:
    cache = make_cache(experts=6, slots=3)
    watcher = Watcher(MarginalGain(period=1, smoothing=0.0), cache)
    watcher.forward({0: [0, 1, 2]}, clock=1)  # none was used before: no hit with any slots
    watcher.forward({0: [3]}, clock=2)
    assert not watcher.memory.curve[0].any()
    cache.score[0] = [0.0, 0.0, 5.0, 0.0, 9.0, 9.0]
    # before 0: 4 and 5 (score 9), 2 (5), then by recency 3, 1, 0; 4 was never used
    watcher.forward({0: [0, 2, 4]}, clock=3)
    watcher.forward({}, clock=4)
    assert watcher.memory.curve[0].tolist() == [0, 0, 1, 0, 0, 1]
    assert watcher.memory.gain[0].tolist() == pytest.approx([1 / 3] * 6)


@given(values=st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_the_falling_fit_is_the_least_squares_fit(values: list[int]) -> None:
    n = len(values)
    fitted, weight = np.zeros(n), np.zeros(n)
    in_python(fit_falling)(np.array(values, np.float64), fitted, weight, n)

    def mean(a: int, b: int) -> float:
        return sum(values[a : b + 1]) / (b - a + 1)

    expected = [min(max(mean(a, b) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]
    assert fitted.tolist() == pytest.approx(expected)


@given(
    curves=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=3),
    slots=st.integers(0, 4),
)
def test_marginal_gain_makes_the_most_hits_of_falling_curves(
    curves: list[list[int]], slots: int
) -> None:
    layers = len(curves)
    falling = [sorted(curve, reverse=True) for curve in curves]
    cache = make_cache(layers=layers, experts=4, slots=slots)
    watcher = Watcher(MarginalGain(period=1, floor=0.0), cache)
    watcher.forward({})
    watcher.memory.curve[:, :4] = falling
    given_slots = watcher.forward({})

    def hits(allocation: Any) -> int:
        return sum(sum(curve[:n]) for curve, n in zip(falling, allocation, strict=True))

    every = itertools.product(range(5), repeat=layers)
    best = max(hits(a) for a in every if sum(a) == layers * slots)
    assert sum(given_slots) == layers * slots
    assert hits(given_slots) == best


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (FrontLoaded, {"slope": 1.5}),
        *((kind, {"period": 0}) for kind in (LayerAdapt, MarginalGain)),
        *((kind, {"smoothing": 1.0}) for kind in (LayerAdapt, MarginalGain)),
        *((kind, {"floor": -0.1}) for kind in (LayerAdapt, MarginalGain)),
        (LayerAdapt, {"change": -0.1}),
    ],
)
def test_wrong_hyper_parameters_are_refused_by_name(part: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        part(**wrong)
