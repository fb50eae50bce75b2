"""The compiled part of the made-up model: a matrix product and the router's choice."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled._jit import njit

Array = NDArray[Any]


@njit
def multiply(left: Array, right: Array, result: Array) -> None:
    """left f32[T, D] times right f32[D, M] into result f32[T, M].

    Not BLAS: the sums come in one order everywhere, and no threads wait for a busy core.
    """
    rows, inner = left.shape
    columns = right.shape[1]
    for begin in range(0, columns, 1024):
        end = min(begin + 1024, columns)
        for row in range(rows):
            for column in range(begin, end):
                result[row, column] = 0.0
            for i in range(inner):
                factor = left[row, i]
                for column in range(begin, end):
                    result[row, column] += factor * right[i, column]


@njit
def select_experts(
    scores: Array,  # f32[rows, E]
    groups: int,
    kept_groups: int,
    ids: Array,  # out u16[rows, k] by falling score
    weights: Array,  # out f32[rows, k] the selected scores
) -> None:
    """Group-limited top-k: the best groups by the sum of their two best, then the best k in them.

    Ties go to the lower id.
    """
    rows, experts = scores.shape
    top_k = ids.shape[1]
    size = experts // groups
    group_score = np.zeros(groups, dtype=np.float64)
    open_group = np.zeros(groups, dtype=np.bool_)
    taken = np.zeros(experts, dtype=np.bool_)
    for row in range(rows):
        for g in range(groups):
            best = -np.inf
            second = -np.inf
            for e in range(g * size, (g + 1) * size):
                value = np.float64(scores[row, e])
                if value > best:
                    second = best
                    best = value
                elif value > second:
                    second = value
            group_score[g] = best + second if size > 1 else best
            open_group[g] = False
        for _ in range(kept_groups):
            chosen = -1
            for g in range(groups):
                if not open_group[g] and (chosen < 0 or group_score[g] > group_score[chosen]):
                    chosen = g
            open_group[chosen] = True
        for slot in range(top_k):
            chosen = -1
            for g in range(groups):
                if not open_group[g]:
                    continue
                for e in range(g * size, (g + 1) * size):
                    if not taken[e] and (chosen < 0 or scores[row, e] > scores[row, chosen]):
                        chosen = e
            taken[chosen] = True
            ids[row, slot] = chosen
            weights[row, slot] = scores[row, chosen]
        for slot in range(top_k):
            taken[ids[row, slot]] = False
