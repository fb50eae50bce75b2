"""Belady's MIN: the expert whose next use is furthest away leaves first.

With `admission: compete` this is MIN with bypass: a transferred expert may be used once and
discarded. Optimal in hits for experts of one size, without prefetch; it knows nothing of time, so
it is no bound on TPOT once work is shared with the CPU or copied ahead. The future is this request
(lifecycle `request`) or the whole trace (`persistent`). Cost: O(A) a step; `next_use` is one pass.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.policies.interface import NEVER, OBSERVE, Cache, Step
from oled.policies.kernel import Memory, NoMemory, kernel
from oled.policies.part import Retention
from oled.policies.struct import Cube, Mutable, Vector
from oled.trace.steps import Steps


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: Belady) -> None:
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] = -step.next_use[i]


@dataclasses.dataclass(frozen=True, slots=True)
class Belady(Retention):
    """Furthest next use leaves first; needs the future."""

    needs = frozenset({"order", "future"})
    observe = observe


class FirstUses(Memory):
    """When each request begins and first uses its experts, and how many requests have begun."""

    use: Cube[np.float64]  # [R, L, E] the layer-step of the first use, NEVER if none
    forward: Vector[np.float64]  # [R] the first forward
    begun: Mutable[float] = 0.0


@kernel(OBSERVE)
def observe_from_the_start(
    step: Step, cache: Cache, memory: FirstUses, params: BeladyFromTheStart
) -> None:
    layers, experts = cache.resident.shape
    begun, requests = int(memory.begun), memory.forward.size
    while begun < requests and step.forward >= memory.forward[begun]:
        begun += 1
    if begun != int(memory.begun):
        memory.begun = begun
        for layer in range(layers):
            for expert in range(experts):
                if cache.resident[layer, expert] != 0 and cache.stamp[layer, expert] < 0:
                    cache.score[layer, expert] = -memory.use[begun - 1, layer, expert]
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] = -step.next_use[i]


@dataclasses.dataclass(frozen=True, slots=True)
class BeladyFromTheStart(Belady):
    """Belady that also knows when the residents placed before a request are used first."""

    learned = True
    observe = observe_from_the_start

    def first_memory(self, steps: Steps) -> FirstUses:
        """Return what the whole trace says, none of whose requests has begun."""
        _, first, request = np.unique(steps.request, return_index=True, return_inverse=True)
        shape = (first.size, steps.num_layers, int(steps.num_experts.max()))
        use = np.full(shape, float(NEVER))
        step = np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))
        uses = (request[steps.forward[step]], steps.layer[step], steps.expert)
        np.minimum.at(use, uses, step.astype(np.float64))
        return FirstUses(use=use, forward=first.astype(np.float64))
