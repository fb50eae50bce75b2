"""The compiled work of the lanes: one call a job, without the GIL.

Letters: T tokens, k top-k, H hidden size, I width of an expert, A active experts, P = T * k pairs
(pair p is slot p % k of token p // k), R rows of a block of experts, S numbers of one expert.

An expert is one row: gate and up projections [2 I, H], down projection [H, I], then the biases
[2 I] and [H] where it has any. All of a row's sums run in one order that depends on neither the
number of tokens nor the lane, so results are bitwise equal wherever an expert is computed. Floating
point is relaxed only where sums are vectorised (`reassoc`, `contract`): a NaN stays a NaN.

Compiled functions here use nothing of other files (see `oled._jit`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

import oled._jit  # noqa: F401  (sets the folder of compiled code before the first decorator)
from oled.types import Floats, Ints

SILU, CLAMPED_SWIGLU = 0, 1

_nogil: Callable[..., Any] = functools.partial(
    numba.njit, cache=True, nogil=True, error_model="numpy"
)
_summing: Callable[..., Any] = functools.partial(_nogil, fastmath={"reassoc", "contract"})
_clock_gettime = types.ExternalFunction(
    "clock_gettime", types.int32(types.int32, types.CPointer(types.int64))
)
_CLOCK = time.CLOCK_MONOTONIC


class ExpertForm(NamedTuple):
    """How the numbers of an expert lie in its row, and what its gate does."""

    hidden: int  # H
    width: int  # I
    interleaved: bool  # gate and up rows alternate, else all gate rows come first
    biased: bool
    activation: int  # SILU, CLAMPED_SWIGLU
    alpha: float  # of the clamped gate: gate * sigmoid(alpha * gate) * (up + 1)
    limit: float

    @property
    def size(self) -> int:
        """S."""
        biases = 2 * self.width + self.hidden if self.biased else 0
        return 3 * self.hidden * self.width + biases


@_summing()  # type: ignore[untyped-decorator]
def compute(
    block: Floats,
    row: Ints,
    chosen: Ints,
    starts: Ints,
    pairs: Ints,
    top_k: int,
    x: Floats,
    weight: Floats,
    y: Floats,
    gated: Floats,
    form: ExpertForm,
) -> None:
    """Weighted outputs of the experts at the positions `chosen` of the active set.

    block f32[R, S]; row i64[A] of `block` for each position; position i has the pairs
    `pairs[starts[i]:starts[i + 1]]`; x f32[T, H], weight f32[P], y f32[P, H] (written), gated
    f32[I] scratch of this lane.
    """
    hidden, width = form.hidden, form.width
    down = 2 * width * hidden
    bias = down + hidden * width
    for c in range(chosen.size):
        i = chosen[c]
        expert = block[row[i]]
        for j in range(starts[i], starts[i + 1]):
            pair = pairs[j]
            token = x[pair // top_k]
            for n in range(width):
                gate_row = 2 * n if form.interleaved else n
                up_row = 2 * n + 1 if form.interleaved else width + n
                at_gate, at_up = gate_row * hidden, up_row * hidden
                gate, up = np.float32(0.0), np.float32(0.0)
                for h in range(hidden):
                    gate += expert[at_gate + h] * token[h]
                    up += expert[at_up + h] * token[h]
                if form.biased:
                    gate += expert[bias + gate_row]
                    up += expert[bias + up_row]
                if form.activation == SILU:
                    gated[n] = gate / (np.float32(1.0) + np.float32(math.exp(-gate))) * up
                else:
                    if gate > form.limit:
                        gate = np.float32(form.limit)
                    if up > form.limit:
                        up = np.float32(form.limit)
                    if up < -form.limit:
                        up = np.float32(-form.limit)
                    share = np.float32(1.0 / (1.0 + math.exp(-form.alpha * gate)))
                    gated[n] = (up + np.float32(1.0)) * gate * share
            scale = weight[pair]
            for h in range(hidden):
                total = np.float32(0.0)
                at = down + h * width
                for n in range(width):
                    total += expert[at + n] * gated[n]
                if form.biased:
                    total += expert[bias + 2 * width + h]
                y[pair, h] = total * scale


@_nogil()  # type: ignore[untyped-decorator]
def copy_poisoned(source: Floats, target: Floats, first: int = 0) -> None:
    """Copy from number `first` on; the expert's very first is NaN until it lands."""
    target[0] = np.nan
    begin = max(first, 1)
    target[begin:] = source[begin:]


@_nogil()  # type: ignore[untyped-decorator]
def combine(y: Floats, top_k: int, out: Floats) -> None:
    """Sum the slots of each token in their order: y f32[T * k, H] -> out f32[T, H]."""
    for token in range(out.shape[0]):
        for h in range(out.shape[1]):
            total = np.float32(0.0)
            for slot in range(top_k):
                total += y[token * top_k + slot, h]
            out[token, h] = total


@_nogil()  # type: ignore[untyped-decorator]
def group_pairs(ids: NDArray[np.int32], index: Ints, starts: Ints, pairs: Ints) -> None:
    """Sort the pairs by their expert's position in the active set, each in pair order.

    ids i32[P]; index i64[E] position of an expert, -1 where it is not active; starts i64[A + 1] and
    pairs i64[P] are written. Ids outside the experts (unused slots) have no position.
    """
    starts[:] = 0
    for p in range(ids.size):
        if 0 <= ids[p] < index.size and index[ids[p]] >= 0:
            starts[index[ids[p]] + 1] += 1
    for i in range(1, starts.size):
        starts[i] += starts[i - 1]
    total = starts[starts.size - 1]
    for p in range(ids.size - 1, -1, -1):  # from behind: each expert's end becomes its begin
        if 0 <= ids[p] < index.size and index[ids[p]] >= 0:
            end = index[ids[p]] + 1
            starts[end] -= 1
            pairs[starts[end]] = p
    for i in range(starts.size - 1):
        starts[i] = starts[i + 1]
    starts[starts.size - 1] = total


@_nogil()  # type: ignore[untyped-decorator]
def spin_until(deadline_ns: int, clock: Ints) -> int:
    """Watch the monotonic clock until the deadline; returns the time. clock i64[2] is scratch."""
    while True:
        _clock_gettime(_CLOCK, clock.ctypes)
        now = clock[0] * 1_000_000_000 + clock[1]
        if now >= deadline_ns:
            return int(now)


def warm() -> None:
    """Have all functions compiled, or loaded, before time counts."""
    form = ExpertForm(1, 1, False, False, SILU, 0.0, 0.0)
    block, x = np.zeros((2, form.size), np.float32), np.zeros((1, 1), np.float32)
    starts, pairs, index = np.zeros(2, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    group_pairs(np.zeros(1, np.int32), index, starts, pairs)
    compute(block, index, index, starts, pairs, 1, x, x[0], x.copy(), x[0].copy(), form)
    copy_poisoned(block[0], block[1])
    copy_poisoned(block[0], block[1], 1)
    combine(x, 1, x.copy())
    spin_until(0, np.zeros(2, np.int64))
