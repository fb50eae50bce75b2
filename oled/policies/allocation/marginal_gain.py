"""Marginal gain (ours): each slot goes to the layer in which it would have made the most hits.

At every layer-step the active experts are looked up in the retention's own ranking of the layer
(score, then recency, as in eviction): an expert of rank r is a hit with more than r slots, one
that was not used before in the request with no number of slots. The counts by rank are the layer's
hit curve, gathered over the forwards of a period (denoising or decoding) and smoothed over
periods. Curves are made falling (pool adjacent violators), so that handing out slots one by one by
the next hit per byte is exact for them, between a floor and the layer's experts. Recency in the
ranking matters: without it all experts that score 0 share one rank. Cost: O(A * E) a step, O(L * E
+ slots * L) a period.
"""

from __future__ import annotations

import dataclasses
import math

from oled._jit import inner_njit
from oled.policies.apportion import LOWEST, MOST, hand_out
from oled.policies.interface import ALLOCATE, WATCH, At, Cache, Step, kernel
from oled.policies.part import Allocation
from oled.trace.schema import Phase

DENOISE, DECODE = int(Phase.DENOISE), int(Phase.DECODE)

# Planes of the memory; columns of STATE behind LOWEST and MOST, one row a layer (FORWARDS: row 0).
CURVE, RECENT, GAIN, WEIGHT, STATE, PLANES = range(6)
START, FORWARDS, COLUMNS = 2, 3, 4


@kernel(WATCH)
def watch(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    if step.phase != DENOISE and step.phase != DECODE:
        return
    score, stamp = cache.score[step.layer], cache.stamp[step.layer]
    for i in range(step.expert.size):
        expert = step.expert[i]
        if stamp[expert] < 0:  # not used before in this request
            continue
        rank = 0
        for other in range(cache.num_experts[step.layer]):
            newer = score[other] == score[expert] and stamp[other] > stamp[expert]
            rank += score[other] > score[expert] or newer
        memory[RECENT, step.layer, rank] += 1.0


@kernel(ALLOCATE)
def allocate(at: At, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    period, smoothing, floor = params[0], params[1], params[2]
    if at.phase != DENOISE and at.phase != DECODE:
        return
    state = memory[STATE]
    layers = cache.capacity.size
    first = state[0, FORWARDS] == 0.0
    state[0, FORWARDS] += 1.0
    if first:
        for layer in range(layers):
            state[layer, START] = cache.capacity[layer]
    if state[0, FORWARDS] <= period:
        return
    state[0, FORWARDS] = 1.0
    budget = 0.0
    for layer in range(layers):
        curve, recent, gain = memory[CURVE, layer], memory[RECENT, layer], memory[GAIN, layer]
        experts, row = cache.num_experts[layer], state[layer]
        for rank in range(experts):
            curve[rank] = smoothing * curve[rank] + recent[rank]
            recent[rank] = 0.0
        fit_falling(curve, gain, memory[WEIGHT, layer], experts)
        for rank in range(experts):
            gain[rank] /= cache.expert_bytes[layer]
        budget += row[START] * cache.expert_bytes[layer]
        row[LOWEST], row[MOST] = math.ceil(floor * row[START]), experts
    hand_out(memory[GAIN], state, cache.expert_bytes, budget, cache.capacity)


@inner_njit
def fit_falling(values, fitted, weight, n):  # type: ignore[no-untyped-def]
    """Least-squares fit of the first `n` values that never rises, by pooling adjacent violators."""
    pools = 0
    for i in range(n):
        fitted[pools], weight[pools] = values[i], 1.0
        pools += 1
        while pools > 1 and fitted[pools - 2] <= fitted[pools - 1]:
            pools -= 1
            both = weight[pools - 1] + weight[pools]
            total = fitted[pools - 1] * weight[pools - 1] + fitted[pools] * weight[pools]
            fitted[pools - 1], weight[pools - 1] = total / both, both
    end = n
    for pool in range(pools - 1, -1, -1):
        value, begin = fitted[pool], end - int(weight[pool])
        for i in range(begin, end):
            fitted[i] = value
        end = begin


@dataclasses.dataclass(frozen=True, slots=True)
class MarginalGain(Allocation):
    """Slots by the hits that they would have made.

    period: denoising (or decoding) forwards between two refreshes, at least 1.
    smoothing: share of the old curve kept at a refresh, 0 <= smoothing < 1.
    floor: least slots of a layer, as a share of what it began with, 0 <= floor <= 1.
    """

    period: int = 5
    smoothing: float = 0.8
    floor: float = 0.25

    needs = frozenset({"order"})
    watch = watch
    allocate = allocate

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period is {self.period}; it must be at least 1 forward")
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing is {self.smoothing}; it must lie in [0, 1)")
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"floor is {self.floor}; it must lie in [0, 1]")

    def memory_shape(self, layers: int, experts: int) -> tuple[int, int, int]:
        return (PLANES, layers, max(experts, COLUMNS))
