"""The compiled part of `stats`: pairs of forwards compared layer by layer."""

from __future__ import annotations

import numpy as np

from oled._jit import njit
from oled.types import Array

UNUSED = 65535  # NO_EXPERT
PAD = 3  # TokenState

# what `compare_sets` adds up for each (request, slot, layer)
PAIRS, OF_NEW, OF_OLD, JACCARD, CHANCE_NEW, CHANCE_OLD, COSINE = range(7)
MEASURES = 7


@njit
def compare_sets(
    old: Array,  # i64[P] steps
    new: Array,  # i64[P] of the same layers
    request: Array,  # i64[P] row of the sums
    slot: int,  # column of the sums
    layer: Array,
    offsets: Array,
    expert: Array,
    count: Array,
    num_experts: Array,
    sums: Array,  # out f64[requests, slots, L, MEASURES], zeroed
) -> None:
    """Add up overlap, its chance level, and the cosine of token counts of pairs of active sets."""
    for p in range(old.shape[0]):
        a, b = old[p], new[p]
        size_old, size_new = offsets[a + 1] - offsets[a], offsets[b + 1] - offsets[b]
        if size_old == 0 or size_new == 0:
            continue
        common, dot = _product(a, b, offsets, expert, count)
        norm = np.sqrt(_square(a, offsets, count) * _square(b, offsets, count))
        cell = sums[request[p], slot, layer[a]]
        cell[PAIRS] += 1.0
        cell[OF_NEW] += common / size_new
        cell[OF_OLD] += common / size_old
        cell[JACCARD] += common / (size_old + size_new - common)
        cell[CHANCE_NEW] += size_old / num_experts[layer[a]]
        cell[CHANCE_OLD] += size_new / num_experts[layer[a]]
        cell[COSINE] += dot / norm


@njit
def _square(step: int, offsets: Array, count: Array) -> float:
    """Return the squared norm of a step's tokens by expert."""
    total = 0.0
    for i in range(offsets[step], offsets[step + 1]):
        total += np.float64(count[i]) * np.float64(count[i])
    return total


@njit
def _product(a: int, b: int, offsets: Array, expert: Array, count: Array) -> tuple[int, float]:
    """Return the common experts of two steps, and the product of their tokens by expert."""
    i, j = offsets[a], offsets[b]
    common, dot = 0, 0.0
    while i < offsets[a + 1] and j < offsets[b + 1]:
        if expert[i] == expert[j]:
            common += 1
            dot += np.float64(count[i]) * np.float64(count[j])
        ahead = expert[i] <= expert[j]
        j += expert[j] <= expert[i]
        i += ahead
    return common, dot


@njit
def compare_routes(
    old: Array,  # i64[P] steps
    new: Array,  # i64[P] of the same layers
    source: Array,  # i64[steps] forward of a step as numbered in the trace
    layer: Array,
    begin: Array,  # i64[steps] rows of a step
    end: Array,  # i64[steps]
    token: Array,  # u16[R]
    expert_ids: Array,  # u16[R, k]
    token_offsets: Array,  # i64[F+1] by number in the trace
    position: Array,  # u32[tokens]
    state: Array,  # u8[tokens]
    kept: Array,  # out f64[tokens] sum over layers of the fraction of a token's experts that stay
    layers: Array,  # out i64[tokens] how many layers that is
    successor: Array,  # out i64[tokens] the same token in the next forward, -1 none
    by_layer: Array,  # out f64[L, 2] sum and number
) -> None:
    """Add up which share of each token's experts is named again for it in the next forward."""
    for p in range(old.shape[0]):
        a, b = old[p], new[p]
        base_new = token_offsets[source[b]]
        row = begin[b]
        for before in range(begin[a], end[a]):
            at = token_offsets[source[a]] + np.int64(token[before])
            if state[at] == PAD:
                continue
            row = _row_at(position[at], row, end[b], base_new, token, position, state)
            if row == end[b]:
                break
            after = base_new + np.int64(token[row])
            share = _shared(expert_ids, before, row) if position[after] == position[at] else -1.0
            if share >= 0.0:
                kept[at] += share
                layers[at] += 1
                successor[at] = after
                by_layer[layer[a], 0] += share
                by_layer[layer[a], 1] += 1.0


@njit
def _row_at(
    wanted: int, row: int, end: int, base: int, token: Array, position: Array, state: Array
) -> int:
    """Return the next row that is not before a position; they ascend, but for those of pads."""
    while row < end:
        at = base + np.int64(token[row])
        if state[at] != PAD and position[at] >= wanted:
            return row
        row += 1
    return end


@njit
def _shared(expert_ids: Array, before: int, after: int) -> float:
    """Return the share of a row's experts that another row names too; -1 where it has none."""
    used, same = 0, 0
    for slot in range(expert_ids.shape[1]):
        e = expert_ids[before, slot]
        if e == UNUSED:
            continue
        used += 1
        for other in range(expert_ids.shape[1]):
            if expert_ids[after, other] == e:
                same += 1
    return same / used if used > 0 else -1.0
