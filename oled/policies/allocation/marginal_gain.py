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

import numpy as np

from oled._jit import jitable
from oled.policies.apportion import hand_out
from oled.policies.interface import ALLOCATE, WATCH, At, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Allocation
from oled.policies.struct import Matrix, Mutable, Vector
from oled.trace.schema import Phase
from oled.types import Doubles

DENOISE, DECODE = int(Phase.DENOISE), int(Phase.DECODE)


class Curves(Memory):
    """The hit curves, by rank [L, E], and bounds of the slots [L]."""

    curve: Matrix[np.float64]  # smoothed hits by rank
    recent: Matrix[np.float64]  # hits by rank in the running period
    gain: Matrix[np.float64]  # the falling curve, per byte
    weight: Matrix[np.float64]  # scratch of the fit
    lowest: Vector[np.float64]  # slots at the coming refresh: at least
    most: Vector[np.float64]  # and at most
    start: Vector[np.float64]  # slots at the beginning
    forwards: Mutable[float] = 0.0  # of the running period


@kernel(WATCH)
def watch(step: Step, cache: Cache, memory: Curves, params: MarginalGain) -> None:
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
        memory.recent[step.layer, rank] += 1.0


@kernel(ALLOCATE)
def allocate(at: At, cache: Cache, memory: Curves, params: MarginalGain) -> None:
    if at.phase != DENOISE and at.phase != DECODE:
        return
    layers = cache.capacity.size
    first = memory.forwards == 0.0
    memory.forwards += 1.0
    if first:
        for layer in range(layers):
            memory.start[layer] = cache.capacity[layer]
    if memory.forwards <= params.period:
        return
    memory.forwards = 1.0
    budget = 0.0
    for layer in range(layers):
        curve, recent, gain = memory.curve[layer], memory.recent[layer], memory.gain[layer]
        experts, start = cache.num_experts[layer], memory.start[layer]
        for rank in range(experts):
            curve[rank] = params.smoothing * curve[rank] + recent[rank]
            recent[rank] = 0.0
        fit_falling(curve, gain, memory.weight[layer], experts)
        for rank in range(experts):
            gain[rank] /= cache.expert_bytes[layer]
        budget += start * cache.expert_bytes[layer]
        memory.lowest[layer], memory.most[layer] = math.ceil(params.floor * start), experts
    hand_out(memory.gain, memory.lowest, memory.most, cache.expert_bytes, budget, cache.capacity)


@jitable
def fit_falling(values: Doubles, fitted: Doubles, weight: Doubles, n: int) -> None:
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

    def memory(self, layers: int, experts: int) -> Curves:
        by_rank, bound = np.zeros((layers, experts)), np.zeros(layers)
        return Curves(
            curve=by_rank, recent=by_rank, gain=by_rank, weight=by_rank,
            lowest=bound, most=bound, start=bound,
        )  # fmt: skip
