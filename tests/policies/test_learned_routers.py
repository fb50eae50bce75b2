"""Temporal and spatio-temporal router: by hand, and against the published replay on a free link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from oled.policies.composition import load_composition
from oled.policies.interface import FILL, Queue
from oled.policies.kernel import NoMemory
from oled.policies.prefetch.refine import Refine
from oled.policies.retention.future_router import FutureRouter
from oled.sim.metrics import count_metrics
from oled.trace.schema import Phase
from tests.sim.build import Forward, Machine, make_steps, replay
from tests.support.seeds import for_each_seed

from .build import call, make_cache, make_costs, make_plan, make_queue, make_side, make_step


def test_the_priority_is_the_score_now_plus_the_score_to_come() -> None:
    cache = make_cache(experts=4)
    cache.score[:] = 9.0  # nothing of the past stays
    step = make_step([1, 2], scores=[0.0, 0.5, 0.25, 0.125], coming=[0.5, 0.25, 0.0, 0.125])
    part = FutureRouter()
    call(part.observe, step, cache, NoMemory(), part.params())
    assert cache.score[0].tolist() == [0.5, 0.75, 0.25, 0.25]


def refine(
    layer: int, due_layer: int | None, score: list[float], slots: int, **fields: Any
) -> tuple[list[int], list[float], Queue]:
    """What is asked for at `layer` of two, with 0 and 1 resident in the layer that is due.

    RouterOutput here: expert 3 gets 4 and expert 5 gets 2 in all, of 4 tokens.
    """
    here = make_step([0], layer=layer, tokens=4, clock=1)
    steps = [here]
    if due_layer is not None:
        steps.append(make_step([0], layer=due_layer, forward=int(due_layer <= layer), clock=2))
    ahead = (1 if due_layer is None else due_layer - layer - 1) % 2 + 1
    said = np.zeros(len(steps) * 2 + 1, np.int64)
    said[ahead:] = 2
    side = make_side(steps, layers=2, experts=6)._replace(
        pred_offsets=said,
        pred_expert=np.array([3, 5], np.uint16),
        pred_score=np.array([4.0, 2.0], np.float32),
        horizons=2,
    )
    cache = make_cache(layers=2, experts=6, slots=slots, resident={0: [0, 1], 1: [0, 1]})
    cache.score[:] = score
    queue, part = make_queue(), Refine(**fields)
    queue.end = 3  # what an earlier layer asked for is dropped
    rest = (make_costs(), make_plan(experts=6), side, queue, NoMemory(), part.params())
    call(part.ask, here, cache, *rest)
    span = slice(queue.begin, queue.end)
    where = due_layer if due_layer is not None else 0
    assert (queue.kind[span] == FILL).all()
    assert (queue.due[span] == 1).all()
    assert (queue.layer[span] == where).all()
    return queue.expert[span].tolist(), cache.score[where].tolist(), queue


def test_predicted_experts_above_the_lowest_residents_are_asked_for_highest_first() -> None:
    """Three slots: after 0.25, 1.0 (3) and 0.5 (5) are added, the best three are 3, 5 and 0."""
    asked, score, _ = refine(0, 1, [0.375, 0.25, 0.0, 0.0, 0.125, 0.0], slots=3, share=1.0)
    assert score == [0.375, 0.25, 0.0, 1.0, 0.125, 0.5]
    assert asked == [3, 5]


def test_a_resident_that_is_high_enough_stays() -> None:
    asked, *_ = refine(0, 1, [0.875, 0.75, 0.0, 0.0, 0.125, 0.0], slots=3, share=1.0)
    assert asked == [3]


def test_no_more_than_the_share_is_replaced() -> None:
    """A share of 0.5 of three slots is one."""
    asked, *_ = refine(0, 1, [0.375, 0.25, 0.0, 0.0, 0.125, 0.0], slots=3, share=0.5)
    assert asked == [3]


def test_the_last_layer_looks_at_the_first_of_the_next_forward() -> None:
    asked, score, _ = refine(1, 0, [0.0] * 6, slots=2, share=1.0)
    assert asked == [3, 5]
    assert score == [0.0, 0.0, 0.0, 1.0, 0.0, 0.5]


def test_at_the_end_nothing_is_asked_for() -> None:
    asked, score, _ = refine(1, None, [0.5] * 6, slots=2, share=1.0)
    assert asked == []
    assert score == [0.5] * 6


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Refine(share=share)


# --- against the published replay -----------------------------------------------------------------

LAYERS, EXPERTS, TOP_K, TOKENS = 3, 10, 2, 40


@dataclass
class Case:
    """An autoregressive text: the experts of every token, and what two heads say."""

    chosen: np.ndarray  # [tokens, L, k]
    native: np.ndarray  # [tokens, L, E]
    future: np.ndarray  # [tokens, L, E] said at (token, layer) about the layer's next token
    spatial: np.ndarray  # [tokens, L, E] said at the predecessor of (token, layer)

    @classmethod
    def random(cls, seed: int) -> Case:
        rng = np.random.default_rng(seed)
        native, future, spatial = rng.random((3, TOKENS, LAYERS, EXPERTS)).astype(np.float32)
        return cls(np.argsort(-native, axis=-1)[:, :, :TOP_K], native, future, spatial)

    def replayed(self, name: str, slots: int, **changes: Any) -> dict[str, Any]:
        """The counts of our engine where copies take no time."""
        layers = [
            {layer: {int(e): 1 for e in row} for layer, row in enumerate(token)}
            for token in self.chosen
        ]
        forwards = [Forward(one, phase=Phase.DECODE, tokens=1) for one in layers]
        said = np.zeros((TOKENS, LAYERS, LAYERS, EXPERTS), np.float32)
        said[:, :, LAYERS - 1] = self.future
        said[:, :-1, 0] = self.spatial[:, 1:]
        said[:-1, -1, 0] = self.spatial[1:, 0]
        rows = said.reshape(-1, EXPERTS)
        spoken = np.zeros((TOKENS, LAYERS, LAYERS), bool)
        spoken[:, :, [0, LAYERS - 1]] = True
        lengths = np.where(spoken.reshape(-1), EXPERTS, 0)
        steps = make_steps(
            forwards,
            [EXPERTS] * LAYERS,
            TOP_K,
            scores=self.native.reshape(-1, EXPERTS),
            pred_offsets=np.concatenate([[0], np.cumsum(lengths)]),
            pred_expert=np.tile(np.arange(EXPERTS, dtype=np.uint16), int(spoken.sum())),
            pred_score=rows[lengths > 0].reshape(-1),
            horizons=LAYERS,
        )
        outcome = replay(
            steps, load_composition(name), Machine(copy=0, copy_wake=0), slots=slots, staging=4
        )
        return count_metrics(outcome.tally.by_phase)

    def published(self, slots: int, most: int) -> tuple[int, int, int]:
        """Accesses, demand misses and proactive inserts of the replay without a clock; at most
        `most` residents are replaced before an access."""
        resident: list[set[int]] = [set() for _ in range(LAYERS)]
        priority = np.zeros((LAYERS, EXPERTS))
        accesses = misses = inserts = 0
        for token in range(TOKENS):
            for layer in range(LAYERS):
                held = resident[layer]
                if most and (token, layer) != (0, 0):
                    refined = priority[layer] + self.spatial[token, layer]
                    best = sorted(range(EXPERTS), key=lambda e, p=refined: -p[e])[:slots]
                    for expert in [e for e in best if e not in held][:most]:
                        if len(held) == slots:
                            held.remove(min(held, key=lambda e, p=refined: p[e]))
                        held.add(expert)
                        inserts += 1
                selected = {int(e) for e in self.chosen[token, layer]}
                accesses += len(selected)
                misses += len(selected - held)
                priority[layer] = self.native[token, layer] + self.future[token, layer]
                held |= selected
                while len(held) > slots:
                    held.remove(min(held - selected, key=lambda e, p=priority[layer]: p[e]))
        return accesses, misses, inserts


@for_each_seed(3)
@pytest.mark.parametrize("slots", [3, 6])
def test_temporal_counts_are_those_of_the_published_replay(seed: int, slots: int) -> None:
    case = Case.random(seed)
    accesses, misses, inserts = case.published(slots, most=0)
    found = case.replayed("temporal_router", slots)
    assert (found["accesses"], found["hits"]) == (accesses, accesses - misses)
    assert found["h2d_bytes"] == 100 * misses
    assert inserts == 0
    assert found["adjusted_hit_rate_as_accesses"] == found["hit_rate"]
    assert found["adjusted_hit_rate_as_misses"] == found["hit_rate"]


@for_each_seed(3)
@pytest.mark.parametrize(("slots", "most"), [(4, 3), (8, 6)])  # three quarters
def test_refined_counts_are_those_of_the_published_replay(seed: int, slots: int, most: int) -> None:
    case = Case.random(seed)
    accesses, misses, inserts = case.published(slots, most)
    found = case.replayed("spatio_temporal_router", slots)
    assert (found["accesses"], found["hits"]) == (accesses, accesses - misses)
    assert found["h2d_bytes"] == 100 * (misses + inserts)
    assert found["adjusted_hit_rate_as_accesses"] == pytest.approx(
        (accesses - misses) / (accesses + inserts)
    )
    assert found["adjusted_hit_rate_as_misses"] == pytest.approx(1 - (misses + inserts) / accesses)


def test_the_published_table_fits_the_first_reading_only() -> None:
    """Qwen3-GSM8K of the paper: hit 90.62 %, 1474 MB a token of 384 accesses of 9.44 MB each."""
    accesses, size = 384, 9.437184
    misses = (1 - 0.9062) * accesses
    inserts = 1474 / size - misses
    assert (accesses - misses) / (accesses + inserts) == pytest.approx(0.6903, abs=2e-3)
    assert 1 - (misses + inserts) / accesses == pytest.approx(0.593, abs=2e-3)
