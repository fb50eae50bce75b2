"""Dial: a predictor of any given precision and recall, for asking what a better one would be worth.

Ours, for case G16. It knows the layer-step `ahead` of this one: each of its active experts is
predicted with probability `recall`, each other one with the probability that makes the expected
share of right predictions `precision` (at most 1, so a high recall of a small share of the experts
can not be arbitrarily imprecise). What is predicted is drawn by a counter-based hash of (seed,
layer-step, expert): the same with and without compilation, in every order of evaluation, and
growing with recall. Copies are asked for in id order, right or wrong, if the expert is not on the
GPU; since residents are more often right, the copies are less precise than the predictions.
Cost: O(E).
"""

from __future__ import annotations

import dataclasses

from oled._jit import jitable
from oled.policies.interface import ASK, HOLD, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import is_wanted, push

MASK = 0x7FFFFFFF


@jitable
def _mix(x: int) -> int:
    """A bijective mixer of 31 bits; no product leaves 63 bits."""
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & MASK
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & MASK
    return x ^ (x >> 16)


@jitable
def draw(seed: int, index: int, expert: int) -> float:
    """Uniform in [0, 1), a function of its arguments only."""
    x = _mix((seed + 0x1B873593) & MASK)
    x = _mix((x + index * 0x9E3779B1) & MASK)
    x = _mix((x + expert * 0x85EBCA6B) & MASK)
    return float(x / (MASK + 1.0))


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: NoMemory,
    params: Dial,
) -> None:
    precision, recall, ahead = params.precision, params.recall, params.ahead
    target = step.index + ahead
    if target >= side.layer.size:
        return
    request = side.forward_request[step.forward]
    if side.forward_request[side.forward[target]] != request:
        return
    layer = side.layer[target]
    at, last = side.offsets[target], side.offsets[target + 1]
    active, experts = last - at, cache.num_experts[layer]
    by_mistake = 0.0
    if experts > active:
        by_mistake = recall * active * (1.0 - precision) / precision / (experts - active)
    for expert in range(experts):
        probability = by_mistake
        if at < last and side.expert[at] == expert:
            probability = recall
            at += 1
        predicted = draw(side.seed, target, expert) < probability
        if predicted and is_wanted(cache, layer, expert):
            push(queue, layer, expert, HOLD, target, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Dial(Prefetch):
    """Predicts the layer-step `ahead` with this precision and recall; needs the future."""

    precision: float = 0.8
    recall: float = 0.8
    ahead: int = 1

    needs = frozenset({"order", "future"})
    ask = ask

    def __post_init__(self) -> None:
        if not (0.0 < self.precision <= 1.0 and 0.0 <= self.recall <= 1.0):
            raise ValueError(
                f"precision is {self.precision} and recall {self.recall}; "
                "they must lie in (0, 1] and [0, 1]"
            )
        if self.ahead < 1:
            raise ValueError(f"ahead is {self.ahead}; it must be at least 1 layer-step")
