"""The compiled part of the made-up model: its logits and the router's choice.

Products and sums come in one order on every machine: no BLAS, whose order and threads differ.
"""

from __future__ import annotations

import math

import numpy as np

from oled._jit import njit
from oled.trace.synthetic.process import UNROLLED
from oled.types import Array

TILE = 512
"""Columns that stay in the nearest cache while a row is summed up."""


@njit
def multiply(left: Array, right: Array, result: Array) -> None:
    """Multiply left f32[T, D] by right f32[D, M] into result f32[T, M]; UNROLLED divides D."""
    rows, inner = left.shape
    columns = right.shape[1]
    for begin in range(0, columns, TILE):
        end = min(begin + TILE, columns)
        for row in range(rows):
            out = result[row, begin:end]
            for column in range(end - begin):
                out[column] = 0.0
            for i in range(0, inner, UNROLLED):
                a, b, c, d = left[row, i], left[row, i + 1], left[row, i + 2], left[row, i + 3]
                at_a, at_b = right[i, begin:end], right[i + 1, begin:end]
                at_c, at_d = right[i + 2, begin:end], right[i + 3, begin:end]
                for column in range(end - begin):
                    out[column] += (a * at_a[column] + b * at_b[column]) + (
                        c * at_c[column] + d * at_d[column]
                    )


@njit
def add_own(
    logits: Array,  # f32[T, L, E], added to
    own: Array,  # f32[T, L, E] of the tokens' content
    visible: Array,  # f32[T, L] share of it that is seen
    bias: Array,  # f32[2, L, E] of decoded and of masked tokens
    masked: Array,  # bool[T]
) -> None:
    """Add what is seen of a token's content, and what the experts are to its state."""
    tokens, layers, experts = logits.shape
    for token in range(tokens):
        state = 1 if masked[token] else 0
        for layer in range(layers):
            row, content = logits[token, layer], own[token, layer]
            level, share = bias[state, layer], visible[token, layer]
            for expert in range(experts):
                row[expert] += share * content[expert] + level[expert]


@njit
def route(
    logits: Array,  # f32[T, L, E]
    groups: int,
    kept_groups: int,
    softmax: bool,
    weight_sum: float,
    ids: Array,  # out u16[L, T, k] by falling logit
    weights: Array,  # out f32[L, T, k] sigmoids or exponentials of the chosen, scaled to the sum
) -> None:
    """Choose the best groups by the sum of their two best, then the best k experts in them.

    Ties go to the lower id.
    """
    tokens, layers, experts = logits.shape
    best = np.empty(groups, dtype=np.float32)
    second = np.empty(groups, dtype=np.float32)
    is_open = np.ones(groups, dtype=np.bool_)
    candidate = np.empty(experts, dtype=np.int64)
    for token in range(tokens):
        for layer in range(layers):
            row = logits[token, layer]
            _two_best(row, best, second)
            if kept_groups < groups:
                _open_groups(best, second, kept_groups, is_open)
            found = _candidates(row, second, is_open, ids.shape[2], candidate)
            _sort_best(row, candidate[:found], ids[layer, token])
            _weigh(row, ids[layer, token], softmax, weight_sum, weights[layer, token])


@njit
def best_scores(
    logits: Array,  # f32[T, L, E]
    softmax: bool,
    ids: Array,  # out u16[L, T, m] by falling logit
    values: Array,  # out f32[L, T, m] sigmoids, or shares of all E exponentials
) -> None:
    """Write the m best experts of every token, and the router's scores of them; ties: lower ids."""
    tokens, layers, experts = logits.shape
    every = np.arange(experts)
    for token in range(tokens):
        for layer in range(layers):
            row, best = logits[token, layer], ids[layer, token]
            _sort_best(row, every, best)
            total = 0.0
            for expert in range(experts):
                total += math.exp(np.float64(row[expert]))
            for slot in range(best.shape[0]):
                logit = np.float64(row[best[slot]])
                values[layer, token, slot] = math.exp(logit) / total if softmax else _sigmoid(logit)


@njit
def _two_best(row: Array, best: Array, second: Array) -> None:
    """Find the two highest logits of each group, without branches, which no CPU could predict."""
    groups = best.shape[0]
    size = row.shape[0] // groups
    for group in range(groups):
        high, low = np.float32(-np.inf), np.float32(-np.inf)
        for expert in range(group * size, (group + 1) * size):
            logit = row[expert]
            smaller = logit if logit < high else high
            high = logit if logit > high else high
            low = smaller if smaller > low else low
        best[group], second[group] = high, low


@njit
def _open_groups(best: Array, second: Array, kept: int, is_open: Array) -> None:
    """Open `kept` of the groups to a token."""
    for group in range(best.shape[0]):
        is_open[group] = False
    for _ in range(kept):
        chosen, highest = -1, -1.0
        for group in range(best.shape[0]):
            score = _sigmoid(best[group]) + _sigmoid(second[group])
            if not is_open[group] and score > highest:
                chosen, highest = group, score
        is_open[chosen] = True


@njit
def _candidates(row: Array, second: Array, is_open: Array, top_k: int, candidate: Array) -> int:
    """List experts of open groups that can be among the best k, ascending; return how many.

    Where the open groups' two best are k experts or more, none below all of them is chosen.
    """
    size = row.shape[0] // is_open.shape[0]
    border = np.float32(np.inf)
    known = 0
    for group in range(is_open.shape[0]):
        if is_open[group]:
            border = second[group] if second[group] < border else border
            known += 2
    if known < top_k:
        border = np.float32(-np.inf)
    found = 0
    for group in range(is_open.shape[0]):
        if is_open[group]:
            for expert in range(group * size, (group + 1) * size):
                candidate[found] = expert
                found += row[expert] >= border
    return found


@njit
def _sort_best(row: Array, candidate: Array, chosen: Array) -> None:
    """Sort the best of the candidates by falling logit."""
    top_k = chosen.shape[0]
    for number in range(candidate.shape[0]):
        expert = candidate[number]
        place = min(number, top_k)
        while place > 0 and row[expert] > row[chosen[place - 1]]:
            if place < top_k:
                chosen[place] = chosen[place - 1]
            place -= 1
        if place < top_k:
            chosen[place] = expert


@njit
def _weigh(row: Array, chosen: Array, softmax: bool, weight_sum: float, weights: Array) -> None:
    """Turn the logits of the chosen, the first the highest, into their gate weights."""
    total = 0.0
    for slot in range(chosen.shape[0]):
        logit = np.float64(row[chosen[slot]])
        gate = math.exp(logit - np.float64(row[chosen[0]])) if softmax else _sigmoid(logit)
        weights[slot] = gate
        total += gate
    for slot in range(chosen.shape[0]):
        weights[slot] = np.float64(weights[slot]) * weight_sum / total


@njit
def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-np.float64(logit)))
