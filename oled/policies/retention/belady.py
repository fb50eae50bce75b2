"""Belady's MIN: the expert whose next use is furthest away leaves first.

With `admission: compete` this is MIN with bypass: a transferred expert may be used once and
discarded. Optimal in hits for experts of one size, without prefetch; it knows nothing of time, so
it is no bound on TPOT once work is shared with the CPU or copied ahead. The future is this request
(lifecycle `request`) or the whole trace (`persistent`). Cost: O(A) a step; `next_use` is one pass.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.policies.interface import NEVER, OBSERVE, Cache, Step, kernel
from oled.policies.part import Retention
from oled.trace.steps import Steps
from oled.types import Doubles


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] = -step.next_use[i]


@dataclasses.dataclass(frozen=True, slots=True)
class Belady(Retention):
    """Furthest next use leaves first; needs the future."""

    needs = frozenset({"order", "future"})
    observe = observe


@kernel(OBSERVE)
def observe_from_the_start(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    last = memory.shape[0] - 1  # the requests, then the number of those that have begun
    layers, experts = cache.resident.shape
    begun = int(memory[last, 0, 0])
    if begun < last and step.forward >= memory[begun, 0, experts]:
        while begun < last and step.forward >= memory[begun, 0, experts]:
            begun += 1
        memory[last, 0, 0] = begun
        for layer in range(layers):
            for expert in range(experts):
                if cache.resident[layer, expert] != 0 and cache.stamp[layer, expert] < 0:
                    cache.score[layer, expert] = -memory[begun - 1, layer, expert]
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] = -step.next_use[i]


@dataclasses.dataclass(frozen=True, slots=True)
class BeladyFromTheStart(Belady):
    """Belady that also knows when the residents placed before a request are used first."""

    learned = True
    observe = observe_from_the_start

    def first_memory(self, steps: Steps) -> Doubles:
        """Return float64[requests + 1, L, E + 1]: the layer-step in which a request first uses an
        expert; behind the experts, for layer 0, its first forward."""
        _, first, request = np.unique(steps.request, return_index=True, return_inverse=True)
        experts = int(steps.num_experts.max())
        memory = np.full((first.size + 1, steps.num_layers, experts + 1), float(NEVER))
        step = np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))
        uses = (request[steps.forward[step]], steps.layer[step], steps.expert)
        np.minimum.at(memory, uses, step.astype(np.float64))
        memory[:-1, 0, experts], memory[-1] = first, 0
        return memory
