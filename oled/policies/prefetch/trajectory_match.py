"""Trajectory match: the stored forward most like this one says what comes d layers on (FineMoE).

Source: arXiv 2502.05370 and IntelliSys-Lab/FineMoE-EuroSys26. Read in code: the probability map of
the layers of this forward seen so far is compared by cosine with the same layers of stored maps;
the best match's row for the layer `distance` ahead gives probabilities, and of its experts the
shortest prefix by falling probability is fetched whose sum passes 1 - match (clipped to 0..1), at
least `least`: the worse the match, the more is fetched. The layers before `distance` are served
at the start of the forward by a semantic match of embeddings. *Reconstruction*: maps are shares of
the layer's tokens, since the store keeps those (the calibration trace's requests, one map each, at
most E of them, instead of a thousand forwards); a trace has no embeddings, so the previous
forward's best match stands in for the semantic one. Cost: O(M (A + E)) for the similarities of M
stored maps, O(E) for the prefix.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled._jit import jitable
from oled.policies.interface import ASK, HOLD, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import is_wanted, push, step_ahead
from oled.policies.selection import sort_lowest
from oled.policies.struct import Mutable, Vector


class Similarity(Memory):
    """How like the M stored maps the running forward is."""

    dots: Vector[np.float64]  # [M] product with each map over the layers seen
    norms: Vector[np.float64]  # [M] squared norm of each map over them
    forward: Mutable[float] = 0.0  # the running forward + 1
    own_norm: Mutable[float] = 0.0  # squared norm of its map so far
    best: Mutable[float] = 0.0  # the best stored map + 1
    match: Mutable[float] = 0.0  # and its cosine


@jitable
def _compare(step: Step, side: Side, memory: Similarity, stored: int) -> None:
    """Add this layer to the forward's map and find the best match."""
    if memory.forward != step.forward + 1:
        memory.forward, memory.own_norm = step.forward + 1, 0.0
        for m in range(stored):
            memory.dots[m] = memory.norms[m] = 0.0
    total = 0.0
    for i in range(step.expert.size):
        total += step.count[i]
    for i in range(step.expert.size):
        memory.own_norm += (step.count[i] / total) ** 2
    memory.best, memory.match = 0.0, -1.0
    for m in range(stored):
        for i in range(step.expert.size):
            share = step.count[i] / total
            memory.dots[m] += share * side.store[m, step.layer, step.expert[i]]
        for expert in range(side.store.shape[2]):
            memory.norms[m] += side.store[m, step.layer, expert] ** 2
        norm = np.sqrt(memory.own_norm * memory.norms[m])
        cosine = memory.dots[m] / norm if norm > 0.0 else 0.0
        if cosine > memory.match:
            memory.best, memory.match = m + 1, cosine


@jitable
def _fetch(
    step: Step, cache: Cache, side: Side, queue: Queue, memory: Similarity, layer: int, least: int
) -> None:
    """Ask for the likeliest experts of `layer`."""
    due = step_ahead(side, step, layer)
    stored = int(memory.best) - 1
    if due < 0 or stored < 0:
        return
    experts = cache.num_experts[layer]
    for expert in range(experts):
        cache.key[expert] = -side.store[stored, layer, expert]
        cache.age[expert] = cache.item[expert] = expert
    sort_lowest(cache.key, cache.age, cache.item, experts)
    enough = min(1.0, max(0.0, 1.0 - memory.match))
    mass, taken = 0.0, 0
    while taken < experts and cache.key[taken] < 0.0 and (taken < least or mass < enough):
        if is_wanted(cache, layer, cache.item[taken]):
            push(queue, layer, cache.item[taken], HOLD, due, 1)
        mass -= cache.key[taken]
        taken += 1


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: Similarity,
    params: TrajectoryMatch,
) -> None:
    distance = params.distance
    least = params.least if params.least > 0 else costs.top_k
    layers, experts = cache.resident.shape
    begins = memory.forward != step.forward + 1
    if begins:  # with the previous forward's match
        for layer in range(step.layer + 1, min(step.layer + distance, layers)):
            _fetch(step, cache, side, queue, memory, layer, least)
    _compare(step, side, memory, min(side.store.shape[0], experts))
    if step.layer + distance < layers:
        _fetch(step, cache, side, queue, memory, step.layer + distance, least)


@dataclasses.dataclass(frozen=True, slots=True)
class TrajectoryMatch(Prefetch):
    """Experts `distance` layers ahead, at least `least` (0: top-k), more for a worse match."""

    distance: int = 6
    least: int = 0

    needs = frozenset({"order", "calibration"})
    ask = ask

    def memory(self, layers: int, experts: int) -> Similarity:
        return Similarity(dots=np.zeros(experts), norms=np.zeros(experts))

    def __post_init__(self) -> None:
        if self.distance < 1 or self.least < 0:
            raise ValueError(
                f"distance is {self.distance} and least {self.least}; they must be at least 1 and 0"
            )
