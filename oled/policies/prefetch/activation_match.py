"""Activation-matrix match: the most similar past request says what comes (MoE-Infinity).

Source: arXiv 2401.14361 and EfficientMoE/MoE-Infinity. Read in code: a request's L x E activation
matrix (tokens by layer and expert, over its forwards so far) is compared with a kept collection by
the cosine of corresponding rows, averaged over the layers already seen; the best match is the
prediction. Its rows for later layers, each as shares of the layer's tokens, are multiplied by
1 - distance / (L + 1); at every layer the queue is written anew by falling product. The collection
is the calibration trace's requests, here at most E of them. *Reconstruction*: only the `depth`
highest products are queued, for no more copies can begin before the queue is written again.
Cost: O(M A) for the similarities of M past requests, O(L E) for the queue.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled._jit import inner_njit
from oled.policies.interface import ASK, HOLD, Cache, Queue, Side, Step, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import clear, is_wanted, push, step_ahead

COUNTS, DOTS, NORMS, COSINES = 0, 1, 2, 3
"""Planes of the memory: tokens [L, E]; of layer l and past request m the dot product, the square of
the past row's norm, and the cosine [L, M]."""


@inner_njit
def _compare(step: Step, side: Side, memory: NDArray[np.float64], past: int) -> None:
    """Add this layer-step to the request's row of the layer, and renew its cosines."""
    layer, experts = step.layer, memory.shape[2]
    for i in range(step.expert.size):
        memory[COUNTS, layer, step.expert[i]] += step.count[i]
        for m in range(past):
            memory[DOTS, layer, m] += step.count[i] * side.store[m, layer, step.expert[i]]
    own = 0.0
    for expert in range(experts):
        own += memory[COUNTS, layer, expert] ** 2
    for m in range(past):
        if memory[NORMS, layer, m] == 0.0:
            for expert in range(experts):
                memory[NORMS, layer, m] += side.store[m, layer, expert] ** 2
        norm = np.sqrt(own * memory[NORMS, layer, m])
        memory[COSINES, layer, m] = memory[DOTS, layer, m] / norm if norm > 0.0 else 0.0


@kernel(ASK)
def ask(step: Step, cache: Cache, costs, plan, side: Side, queue: Queue, memory, params) -> None:  # type: ignore[no-untyped-def]
    layers, experts = cache.resident.shape
    past = min(side.store.shape[0], experts)
    _compare(step, side, memory, past)
    if past == 0:
        return
    best, best_sum = 0, -1.0
    for m in range(past):
        total = 0.0
        for layer in range(layers):
            total += memory[COSINES, layer, m]
        if total > best_sum:
            best, best_sum = m, total

    clear(queue)
    depth, n = min(int(params[0]), cache.key.size), 0
    for layer in range(step.layer + 1, layers):
        decay = 1.0 - (layer - step.layer) / (layers + 1.0)
        for expert in range(cache.num_experts[layer]):
            value = side.store[best, layer, expert] * decay
            if value <= 0.0 or (n == depth and value <= cache.key[n - 1]):
                continue
            if not is_wanted(cache, layer, expert):
                continue
            j = n if n < depth else n - 1
            n = j + 1
            while j > 0 and cache.key[j - 1] < value:
                cache.key[j], cache.item[j] = cache.key[j - 1], cache.item[j - 1]
                j -= 1
            cache.key[j], cache.item[j] = value, layer * experts + expert
    for j in range(n):
        layer, expert = cache.item[j] // experts, cache.item[j] % experts
        due = step_ahead(side, step, layer)
        if due >= 0:
            push(queue, layer, expert, HOLD, due, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationMatch(Prefetch):
    """The `depth` likeliest experts of the layers to come, by the most similar past request."""

    depth: int = 32

    needs = frozenset({"order", "calibration"})
    ask = ask

    def memory_shape(self, layers: int, experts: int) -> tuple[int, int, int]:
        return (4, layers, experts)

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth is {self.depth}; it must be at least 1")
