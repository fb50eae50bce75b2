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

from oled._jit import jitable
from oled.policies.interface import ASK, HOLD, Cache, Costs, Plan, Queue, Side, Step
from oled.policies.kernel import Memory, kernel
from oled.policies.part import Prefetch
from oled.policies.prefetch.queue import clear, is_wanted, push, step_ahead
from oled.policies.struct import Matrix


class Similarity(Memory):
    """How like the M past requests the running one is."""

    counts: Matrix[np.float64]  # [L, E] its tokens so far
    dots: Matrix[np.float64]  # [L, M] product with the past row
    norms: Matrix[np.float64]  # [L, M] square of the norm of the past row
    cosines: Matrix[np.float64]  # [L, M]


@jitable
def _compare(step: Step, side: Side, memory: Similarity, past: int) -> None:
    """Add this layer-step to the request's row of the layer, and renew its cosines."""
    layer, experts = step.layer, memory.counts.shape[1]
    for i in range(step.expert.size):
        memory.counts[layer, step.expert[i]] += step.count[i]
        for m in range(past):
            memory.dots[layer, m] += step.count[i] * side.store[m, layer, step.expert[i]]
    own = 0.0
    for expert in range(experts):
        own += memory.counts[layer, expert] ** 2
    for m in range(past):
        if memory.norms[layer, m] == 0.0:
            for expert in range(experts):
                memory.norms[layer, m] += side.store[m, layer, expert] ** 2
        norm = np.sqrt(own * memory.norms[layer, m])
        memory.cosines[layer, m] = memory.dots[layer, m] / norm if norm > 0.0 else 0.0


@kernel(ASK)
def ask(
    step: Step,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    memory: Similarity,
    params: ActivationMatch,
) -> None:
    layers, experts = cache.resident.shape
    past = min(side.store.shape[0], experts)
    _compare(step, side, memory, past)
    if past == 0:
        return
    best, best_sum = 0, -1.0
    for m in range(past):
        total = 0.0
        for layer in range(layers):
            total += memory.cosines[layer, m]
        if total > best_sum:
            best, best_sum = m, total

    clear(queue)
    depth, n = min(params.depth, cache.key.size), 0
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

    def memory(self, layers: int, experts: int) -> Similarity:
        empty = np.zeros((layers, experts))
        return Similarity(counts=empty, dots=empty, norms=empty, cosines=empty)

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth is {self.depth}; it must be at least 1")
