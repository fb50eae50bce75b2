"""OLED LayerAdapt: slots follow demand and effectiveness (arXiv 2609.33385; a *reconstruction*).

Public is that the capacity of each layer is refreshed every five denoising iterations from smoothed
demand and smoothed cache effectiveness. Here: over the forwards of a period (denoising or
autoregressive decoding; commits and prefill are not counted) demand is the mean size of the active
set, effectiveness the hits per slot and forward; both are smoothed over periods. The slots wanted
are proportional to demand x effectiveness: a layer that asks for much and uses what it has grows, a
layer with idle slots shrinks. They become whole by largest remainder, between a floor and the
layer's experts, and change by a bounded number at a time. The bytes of all layers stay the same
(where layers differ in size, up to less than one expert).
Cost: O(A) a step, O(L * E) a period.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from oled.policies.apportion import hand_out
from oled.policies.interface import ALLOCATE, WATCH, At, Cache, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Allocation
from oled.policies.struct import Matrix, Mutable, Vector
from oled.trace.schema import Phase

DENOISE, DECODE = int(Phase.DENOISE), int(Phase.DECODE)


class Demand(Memory):
    """What each layer asked for and used, one entry a layer unless it says otherwise."""

    gain: Matrix[np.float64]  # [L, E] worth of the next slot
    lowest: Vector[np.float64]  # slots at the coming refresh: at least
    most: Vector[np.float64]  # and at most
    start: Vector[np.float64]  # slots at the beginning
    demand: Vector[np.float64]  # smoothed size of the active set
    effect: Vector[np.float64]  # smoothed hits per slot and forward
    active: Vector[np.float64]  # active experts of the running period
    hits: Vector[np.float64]  # and its hits
    forwards: Mutable[float] = 0.0  # of the running period


@kernel(WATCH)
def watch(step: Step, cache: Cache, memory: Demand, params: LayerAdapt) -> None:
    if step.phase != DENOISE and step.phase != DECODE:
        return
    memory.active[step.layer] += step.expert.size
    for i in range(step.expert.size):
        memory.hits[step.layer] += cache.resident[step.layer, step.expert[i]]


@kernel(ALLOCATE)
def allocate(at: At, cache: Cache, memory: Demand, params: LayerAdapt) -> None:
    period, smoothing = params.period, params.smoothing
    if at.phase != DENOISE and at.phase != DECODE:
        return
    layers = cache.capacity.size
    first = memory.forwards == 0.0
    memory.forwards += 1.0
    if first:
        for layer in range(layers):
            memory.start[layer] = cache.capacity[layer]
    if memory.forwards <= period:
        return
    memory.forwards = 1.0
    budget, total = 0.0, 0.0
    for layer in range(layers):
        demand = memory.active[layer] / period
        effect = memory.hits[layer] / period / max(cache.capacity[layer], 1)
        old = smoothing if memory.demand[layer] > 0.0 else 0.0
        memory.demand[layer] = old * memory.demand[layer] + (1.0 - old) * demand
        memory.effect[layer] = old * memory.effect[layer] + (1.0 - old) * effect
        memory.active[layer] = memory.hits[layer] = 0.0
        budget += memory.start[layer] * cache.expert_bytes[layer]
        total += memory.demand[layer] * memory.effect[layer] * cache.expert_bytes[layer]
    if total == 0.0:
        return
    for layer in range(layers):
        slots, start = cache.capacity[layer], memory.start[layer]
        wanted = memory.demand[layer] * memory.effect[layer] * budget / total
        for have in range(cache.num_experts[layer]):
            memory.gain[layer, have] = wanted - have
        most_change = max(1, math.floor(params.change * start))
        memory.lowest[layer] = max(slots - most_change, math.ceil(params.floor * start))
        memory.most[layer] = min(slots + most_change, cache.num_experts[layer])
    hand_out(memory.gain, memory.lowest, memory.most, cache.expert_bytes, budget, cache.capacity)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerAdapt(Allocation):
    """Slots by demand and effectiveness.

    period: denoising (or decoding) forwards between two refreshes, at least 1.
    smoothing: share of the old demand and effectiveness kept at a refresh, 0 <= smoothing < 1.
    floor: least slots of a layer, as a share of what it began with, 0 <= floor <= 1.
    change: most slots that a layer wins or loses at a refresh, as such a share; at least 1 slot.
    """

    period: int = 5
    smoothing: float = 0.5
    floor: float = 0.25
    change: float = 0.1

    needs = frozenset({"order"})
    watch = watch
    allocate = allocate

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period is {self.period}; it must be at least 1 forward")
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing is {self.smoothing}; it must lie in [0, 1)")
        if not 0.0 <= self.floor <= 1.0 or self.change < 0.0:
            raise ValueError(
                f"floor is {self.floor} and change {self.change}; "
                "floor must lie in [0, 1] and change not be negative"
            )

    def memory(self, layers: int, experts: int) -> Demand:
        each = np.zeros(layers)
        return Demand(
            gain=np.zeros((layers, experts)),
            lowest=each, most=each, start=each, demand=each, effect=each, active=each, hits=each,
        )  # fmt: skip
