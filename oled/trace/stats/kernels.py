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
    old: Array,  # i64[P] forwards
    new: Array,  # i64[P]
    request: Array,  # i64[P] row of the sums
    slot: Array,  # i64[P] column of the sums
    step_offsets: Array,
    layer: Array,
    offsets: Array,
    expert: Array,
    count: Array,
    num_experts: Array,
    sums: Array,  # out f64[requests, slots, L, MEASURES], zeroed
) -> None:
    """Overlap, its chance level, and the cosine of token counts of each pair's active sets."""
    for p in range(old.shape[0]):
        b = step_offsets[new[p]]
        b_end = step_offsets[new[p] + 1]
        for a in range(step_offsets[old[p]], step_offsets[old[p] + 1]):
            while b < b_end and layer[b] < layer[a]:
                b += 1
            if b == b_end:
                break
            if layer[b] != layer[a]:
                continue
            i, i_end = offsets[a], offsets[a + 1]
            j, j_end = offsets[b], offsets[b + 1]
            size_old, size_new = i_end - i, j_end - j
            if size_old == 0 or size_new == 0:
                continue
            common = 0
            dot = 0.0
            norm_old = 0.0
            norm_new = 0.0
            for x in range(i, i_end):
                norm_old += np.float64(count[x]) * np.float64(count[x])
            for x in range(j, j_end):
                norm_new += np.float64(count[x]) * np.float64(count[x])
            while i < i_end and j < j_end:
                if expert[i] == expert[j]:
                    common += 1
                    dot += np.float64(count[i]) * np.float64(count[j])
                    i += 1
                    j += 1
                elif expert[i] < expert[j]:
                    i += 1
                else:
                    j += 1
            cell = sums[request[p], slot[p], layer[a]]
            cell[PAIRS] += 1.0
            cell[OF_NEW] += common / size_new
            cell[OF_OLD] += common / size_old
            cell[JACCARD] += common / (size_old + size_new - common)
            cell[CHANCE_NEW] += size_old / num_experts[layer[a]]
            cell[CHANCE_OLD] += size_new / num_experts[layer[a]]
            cell[COSINE] += dot / np.sqrt(norm_old * norm_new)


@njit
def compare_routes(
    old: Array,  # i64[P] forwards
    new: Array,  # i64[P]
    source: Array,  # i64[F] forward as numbered in the trace
    step_offsets: Array,
    layer: Array,
    begin: Array,  # i64[S] rows of a step
    end: Array,  # i64[S]
    token: Array,  # u16[R]
    expert_ids: Array,  # u16[R, k]
    token_offsets: Array,  # i64[F+1] by number in the trace
    position: Array,  # u32[N]
    state: Array,  # u8[N]
    kept: Array,  # out f64[N] sum over layers of the fraction of a token's experts that stay
    layers: Array,  # out i64[N] how many layers that is
    successor: Array,  # out i64[N] the same token in the next forward, -1 none
    by_layer: Array,  # out f64[L, 2] sum and number
) -> None:
    """Which share of each token's experts is named again for it in the next forward."""
    for p in range(old.shape[0]):
        base_old = token_offsets[source[old[p]]]
        base_new = token_offsets[source[new[p]]]
        b = step_offsets[new[p]]
        b_end = step_offsets[new[p] + 1]
        for a in range(step_offsets[old[p]], step_offsets[old[p] + 1]):
            while b < b_end and layer[b] < layer[a]:
                b += 1
            if b == b_end:
                break
            if layer[b] != layer[a]:
                continue
            row = begin[b]
            for before in range(begin[a], end[a]):
                at = base_old + np.int64(token[before])
                if state[at] == PAD:
                    continue
                after = at
                while row < end[b]:  # positions ascend, but for those of pads
                    after = base_new + np.int64(token[row])
                    if state[after] != PAD and position[after] >= position[at]:
                        break
                    row += 1
                if row == end[b]:
                    break
                if position[after] != position[at]:
                    continue
                used = 0
                same = 0
                for slot in range(expert_ids.shape[1]):
                    e = expert_ids[before, slot]
                    if e == UNUSED:
                        continue
                    used += 1
                    for other in range(expert_ids.shape[1]):
                        if expert_ids[row, other] == e:
                            same += 1
                if used == 0:
                    continue
                kept[at] += same / used
                layers[at] += 1
                successor[at] = after
                by_layer[layer[a], 0] += same / used
                by_layer[layer[a], 1] += 1.0
