"""The compiled passes behind `steps`: explicit loops, the same bytes with and without JIT.

Arguments are plain arrays so that one signature serves all traces. `scratch` arrays are indexed by
expert id and left zeroed by every step.
"""

from __future__ import annotations

import numpy as np

from oled._jit import bare_njit, jitable
from oled.types import Array

UNUSED = 65535  # NO_EXPERT
MASKED, PAD = 0, 3  # TokenState
NEVER = 2**62  # a next use that does not come


def scratch_of(num_experts: Array) -> tuple[Array, Array, Array]:
    """Return zeroed counts, last mentions and sums by expert; compiled code allocates nothing."""
    most = int(num_experts.max())
    return np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros((most, 4))


@bare_njit
def aggregate(
    step_begin: Array,  # i64[steps] first row of a step
    step_end: Array,  # i64[steps]
    step_forward: Array,  # i64[steps] forward as numbered in the trace
    step_layer: Array,  # i64[steps] dense layer
    token: Array,  # u16[R]
    expert_ids: Array,  # u16[R, k]
    weights: Array,  # f32[R, k]
    has_weights: bool,
    token_offsets: Array,  # i64[F+1]
    state: Array,  # u8[tokens]
    confidence: Array,  # f32[tokens]
    num_experts: Array,  # i64[L]
    zero_experts: int,
    offsets: Array,  # out i64[steps+1]
    expert: Array,  # out u16
    count: Array,  # out i32
    mass: Array,  # out f32[., 4]
    last_token: Array,  # out i32
    counts: Array,  # scratch: `scratch_of`
    last: Array,
    sums: Array,
) -> tuple[int, int]:
    """Aggregate the active experts of every step; return (-1, 0), or (row, slot) of a wrong value.

    The slot is -1 where the row's token lies outside its forward.
    """
    filled = 0
    offsets[0] = 0
    for s in range(step_forward.shape[0]):
        forward = step_forward[s]
        experts = num_experts[step_layer[s]]
        base = token_offsets[forward]
        for row in range(step_begin[s], step_end[s]):
            t = np.int64(token[row])
            if t >= token_offsets[forward + 1] - base:
                return row, -1
            kind, c = state[base + t], confidence[base + t]
            if kind == PAD:
                continue
            slot = _impossible_slot(expert_ids, row, experts + zero_experts)
            if slot >= 0:
                return row, slot
            total = _total(expert_ids, weights, has_weights, row)
            _add_row(expert_ids, weights, row, total, t, kind, c, experts, counts, last, sums)
        filled = _write_entries(
            experts, counts, last, sums, expert, count, mass, last_token, filled
        )
        offsets[s + 1] = filled
    return -1, 0


@jitable
def _impossible_slot(expert_ids: Array, row: int, limit: int) -> int:
    """Return the first slot of a row whose id is neither unused nor below the limit, or -1."""
    for slot in range(expert_ids.shape[1]):
        e = np.int64(expert_ids[row, slot])
        if e != UNUSED and e >= limit:
            return slot
    return -1


@jitable
def _total(expert_ids: Array, weights: Array, has_weights: bool, row: int) -> float:
    """Return the sum of a row's weights, or minus its number of experts where there is no sum."""
    total, used = 0.0, 0.0
    for slot in range(expert_ids.shape[1]):
        if expert_ids[row, slot] != UNUSED:
            used += 1.0
            total += np.float64(weights[row, slot])
    return total if has_weights and total > 0.0 and total < np.inf else -used


@jitable
def _add_row(
    expert_ids: Array,
    weights: Array,
    row: int,
    total: float,
    token: int,
    kind: int,
    confidence: float,
    experts: int,
    counts: Array,
    last: Array,
    sums: Array,
) -> None:
    """Add a token's experts to those of its step; without a sum of weights all count alike."""
    c = np.float64(1.0) if np.isnan(confidence) else np.float64(confidence)
    top_k = expert_ids.shape[1]
    for slot in range(top_k):
        e = np.int64(expert_ids[row, slot])
        if e >= experts:  # unused, or a zero expert: nothing to fetch or compute
            continue
        g = np.float64(weights[row, slot]) / total if total > 0.0 else -1.0 / total
        counts[e] += 1
        last[e] = token * top_k + slot  # rows come in token order
        sums[e, 0] += g
        if kind == MASKED:
            sums[e, 1] += g
            sums[e, 2] += c * g
        else:
            sums[e, 3] += c * g


@jitable
def _write_entries(
    experts: int,
    counts: Array,
    last: Array,
    sums: Array,
    expert: Array,
    count: Array,
    mass: Array,
    last_token: Array,
    filled: int,
) -> int:
    """Write the experts with tokens behind the `filled` entries, clear them, return the new end."""
    for e in range(experts):
        if counts[e] > 0:
            expert[filled] = e
            count[filled] = counts[e]
            last_token[filled] = last[e]
            for column in range(4):
                mass[filled, column] = sums[e, column]
                sums[e, column] = 0.0
            counts[e] = 0
            filled += 1
    return filled


@bare_njit
def next_uses(
    request: Array,  # i64[F]
    step_forward: Array,  # i64[steps]
    step_layer: Array,  # i64[steps]
    offsets: Array,  # i64[steps+1]
    expert: Array,  # u16[entries]
    num_experts: Array,  # i64[L]
    persistent: bool,
    result: Array,  # out i64[entries]
    upcoming: Array,  # scratch i64[L, E], all NEVER
    current: Array,  # scratch i64[L], all -1
) -> None:
    """Find each entry's next step of its layer that uses the expert, from the last step back."""
    most = upcoming.shape[1]
    for s in range(step_forward.shape[0] - 1, -1, -1):
        layer = step_layer[s]
        owner = request[step_forward[s]]
        if not persistent and owner != current[layer]:
            for e in range(most):
                upcoming[layer, e] = NEVER
            current[layer] = owner
        for i in range(offsets[s], offsets[s + 1]):
            e = expert[i]
            result[i] = upcoming[layer, e]
            upcoming[layer, e] = s


@bare_njit
def merge_steps(
    member_offsets: Array,  # i64[G+1] members of a merged forward
    members: Array,  # i64[.] forwards, in row order
    step_offsets: Array,  # i64[F+1]
    step_layer: Array,  # i64[steps]
    offsets: Array,  # i64[steps+1]
    expert: Array,
    count: Array,
    mass: Array,
    last_token: Array,
    num_experts: Array,  # i64[L]
    merged: Array,  # out i64[steps] the merged step of each step
    out_step_offsets: Array,  # out i64[G+1]
    out_layer: Array,  # out i64[.]
    out_offsets: Array,  # out i64[.]
    out_expert: Array,
    out_count: Array,
    out_mass: Array,
    out_last: Array,
    cursor: Array,  # scratch: a copy of step_offsets[:-1], the next step of each forward
    counts: Array,  # scratch: `scratch_of`
    last: Array,
    sums: Array,
) -> tuple[int, int]:
    """Merge the members' active experts, layer by layer; return (steps, entries) written."""
    steps, filled = 0, 0
    out_step_offsets[0] = 0
    out_offsets[0] = 0
    for g in range(member_offsets.shape[0] - 1):
        for layer in range(num_experts.shape[0]):
            base = -1
            for m in range(member_offsets[g], member_offsets[g + 1]):
                forward = members[m]
                s = cursor[forward]
                if s < step_offsets[forward + 1] and step_layer[s] == layer:
                    cursor[forward] += 1
                    merged[s] = steps
                    base = _add_entries(
                        offsets[s],
                        offsets[s + 1],
                        max(base, 0),
                        expert,
                        count,
                        mass,
                        last_token,
                        counts,
                        last,
                        sums,
                    )
            if base < 0:
                continue
            filled = _write_entries(
                num_experts[layer],
                counts,
                last,
                sums,
                out_expert,
                out_count,
                out_mass,
                out_last,
                filled,
            )
            out_layer[steps] = layer
            steps += 1
            out_offsets[steps] = filled
        out_step_offsets[g + 1] = steps
    return steps, filled


@jitable
def _add_entries(
    begin: int,
    end: int,
    base: int,
    expert: Array,
    count: Array,
    mass: Array,
    last_token: Array,
    counts: Array,
    last: Array,
    sums: Array,
) -> int:
    """Add a member's entries; return the first mention of the next member, which is more recent."""
    latest = base
    for i in range(begin, end):
        e = expert[i]
        counts[e] += count[i]
        last[e] = base + last_token[i]
        latest = max(latest, last[e] + 1)
        for column in range(4):
            sums[e, column] += mass[i, column]
    return latest


@bare_njit
def mean_by_step(
    step: Array,  # i64[Q]
    active: Array,  # bool[Q]
    expert_ids: Array,  # u16[Q, m]
    values: Array,  # f32[Q, m]
    result: Array,  # out f32[steps, E], zeroed
    sums: Array,  # scratch f64[E], zeroed
) -> None:
    """Average the values of a step's active rows; rows of a step follow each other."""
    rows = 0
    for q in range(step.shape[0]):
        if active[q]:
            rows += 1
            for slot in range(expert_ids.shape[1]):
                if expert_ids[q, slot] != UNUSED:
                    sums[expert_ids[q, slot]] += values[q, slot]
        if q + 1 == step.shape[0] or step[q + 1] != step[q]:
            for e in range(sums.shape[0]):
                if rows > 0:
                    result[step[q], e] = sums[e] / rows
                sums[e] = 0.0
            rows = 0
