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

from oled.policies.apportion import LOWEST, MOST, hand_out
from oled.policies.interface import ALLOCATE, WATCH, At, Cache, Step, kernel
from oled.policies.part import Allocation
from oled.trace.schema import Phase

DENOISE, DECODE = int(Phase.DENOISE), int(Phase.DECODE)

# Planes of the memory; columns of STATE behind LOWEST and MOST, one row a layer (FORWARDS: row 0).
GAIN, STATE = 0, 1
START, DEMAND, EFFECT, ACTIVE, HITS, FORWARDS, COLUMNS = 2, 3, 4, 5, 6, 7, 8


@kernel(WATCH)
def watch(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    if step.phase != DENOISE and step.phase != DECODE:
        return
    state = memory[STATE, step.layer]
    state[ACTIVE] += step.expert.size
    for i in range(step.expert.size):
        state[HITS] += cache.resident[step.layer, step.expert[i]]


@kernel(ALLOCATE)
def allocate(at: At, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    period, smoothing, floor, change = params[0], params[1], params[2], params[3]
    if at.phase != DENOISE and at.phase != DECODE:
        return
    gain, state = memory[GAIN], memory[STATE]
    layers = cache.capacity.size
    first = state[0, FORWARDS] == 0.0
    state[0, FORWARDS] += 1.0
    if first:
        for layer in range(layers):
            state[layer, START] = cache.capacity[layer]
    if state[0, FORWARDS] <= period:
        return
    state[0, FORWARDS] = 1.0
    budget, total = 0.0, 0.0
    for layer in range(layers):
        row = state[layer]
        demand, effect = row[ACTIVE] / period, row[HITS] / period / max(cache.capacity[layer], 1)
        old = smoothing if row[DEMAND] > 0.0 else 0.0
        row[DEMAND] = old * row[DEMAND] + (1.0 - old) * demand
        row[EFFECT] = old * row[EFFECT] + (1.0 - old) * effect
        row[ACTIVE] = row[HITS] = 0.0
        budget += row[START] * cache.expert_bytes[layer]
        total += row[DEMAND] * row[EFFECT] * cache.expert_bytes[layer]
    if total == 0.0:
        return
    for layer in range(layers):
        row, slots = state[layer], cache.capacity[layer]
        wanted = row[DEMAND] * row[EFFECT] * budget / total
        for have in range(cache.num_experts[layer]):
            gain[layer, have] = wanted - have
        most_change = max(1, math.floor(change * row[START]))
        row[LOWEST] = max(slots - most_change, math.ceil(floor * row[START]))
        row[MOST] = min(slots + most_change, cache.num_experts[layer])
    hand_out(gain, state, cache.expert_bytes, budget, cache.capacity)


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

    def memory_shape(self, layers: int, experts: int) -> tuple[int, int, int]:
        return (2, layers, max(experts, COLUMNS))
