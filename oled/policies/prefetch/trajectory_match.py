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
from numpy.typing import NDArray

from oled._jit import inner_njit
from oled.policies.interface import ASK, HOLD, Cache, Queue, Side, Step, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import is_wanted, push, step_ahead
from oled.policies.selection import sort_lowest

Rows = NDArray[np.float64]

DOTS, NORMS, STATE = 0, 1, 2
"""Rows of the memory: dot product with and squared norm of each stored map over the layers seen,
and what follows."""
FORWARD, OWN_NORM, BEST, MATCH = 0, 1, 2, 3
"""Columns of STATE: the forward + 1, the squared norm of its map so far, the best stored map + 1
and its cosine."""


@inner_njit
def _compare(step: Step, side: Side, rows: Rows, stored: int) -> None:
    """Add this layer to the forward's map and find the best match."""
    if rows[STATE, FORWARD] != step.forward + 1:
        rows[STATE, FORWARD], rows[STATE, OWN_NORM] = step.forward + 1, 0.0
        for m in range(stored):
            rows[DOTS, m] = rows[NORMS, m] = 0.0
    total = 0.0
    for i in range(step.expert.size):
        total += step.count[i]
    for i in range(step.expert.size):
        rows[STATE, OWN_NORM] += (step.count[i] / total) ** 2
    rows[STATE, BEST], rows[STATE, MATCH] = 0.0, -1.0
    for m in range(stored):
        for i in range(step.expert.size):
            share = step.count[i] / total
            rows[DOTS, m] += share * side.store[m, step.layer, step.expert[i]]
        for expert in range(side.store.shape[2]):
            rows[NORMS, m] += side.store[m, step.layer, expert] ** 2
        norm = np.sqrt(rows[STATE, OWN_NORM] * rows[NORMS, m])
        cosine = rows[DOTS, m] / norm if norm > 0.0 else 0.0
        if cosine > rows[STATE, MATCH]:
            rows[STATE, BEST], rows[STATE, MATCH] = m + 1, cosine


@inner_njit
def _fetch(
    step: Step, cache: Cache, side: Side, queue: Queue, rows: Rows, layer: int, least: int
) -> None:
    """Ask for the likeliest experts of `layer`."""
    due = step_ahead(side, step, layer)
    stored = int(rows[STATE, BEST]) - 1
    if due < 0 or stored < 0:
        return
    experts = cache.num_experts[layer]
    for expert in range(experts):
        cache.key[expert] = -side.store[stored, layer, expert]
        cache.age[expert] = cache.item[expert] = expert
    sort_lowest(cache.key, cache.age, cache.item, experts)
    enough = min(1.0, max(0.0, 1.0 - rows[STATE, MATCH]))
    mass, taken = 0.0, 0
    while taken < experts and cache.key[taken] < 0.0 and (taken < least or mass < enough):
        if is_wanted(cache, layer, cache.item[taken]):
            push(queue, layer, cache.item[taken], HOLD, due, 1)
        mass -= cache.key[taken]
        taken += 1


@kernel(ASK)
def ask(step: Step, cache: Cache, costs, plan, side: Side, queue: Queue, memory, params) -> None:  # type: ignore[no-untyped-def]
    distance = int(params[0])
    least = int(params[1]) if params[1] > 0 else costs.top_k
    layers, experts = cache.resident.shape
    rows = memory[0]
    begins = rows[STATE, FORWARD] != step.forward + 1
    if begins:  # with the previous forward's match
        for layer in range(step.layer + 1, min(step.layer + distance, layers)):
            _fetch(step, cache, side, queue, rows, layer, least)
    _compare(step, side, rows, min(side.store.shape[0], experts))
    if step.layer + distance < layers:
        _fetch(step, cache, side, queue, rows, step.layer + distance, least)


@dataclasses.dataclass(frozen=True, slots=True)
class TrajectoryMatch(Prefetch):
    """Experts `distance` layers ahead, at least `least` (0: top-k), more for a worse match."""

    distance: int = 6
    least: int = 0

    needs = frozenset({"order", "calibration"})
    ask = ask

    def memory_shape(self, layers: int, experts: int) -> tuple[int, int, int]:
        return (1, 3, max(4, experts))

    def __post_init__(self) -> None:
        if self.distance < 1 or self.least < 0:
            raise ValueError(
                f"distance is {self.distance} and least {self.least}; they must be at least 1 and 0"
            )
