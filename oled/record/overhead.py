"""The cost of recording: the same passes with and without it, on the run's own first batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from oled.record.records import forward_records
from oled.running.decode import Decoding, Request
from oled.running.recorder import Recorder

MAX_PASSES = 48
BUDGET_S = 1.0  # of each round and the warm-up
ROUNDS = 3  # plain and recorded


def hook_overhead(
    model: PreTrainedModel,
    decode: Decoding,
    batch: Sequence[Request],
    recorder: Recorder,
) -> float:
    """Return the time added by hooks, copies and records, as a fraction of plain decoding.

    Decoding repeats itself, so pass number i is the same in every round: its best time
    counts, plain and recorded, which leaves out warm-up and what else the machine does.
    """
    passes = _affordable_passes(model, decode, batch)
    plain, recorded = [], []
    for _ in range(ROUNDS):
        plain.append(_run(model, decode, batch, passes, None))
        recorded.append(_run(model, decode, batch, passes, recorder))
    best = np.min(plain, axis=0).sum()
    return max(0.0, float(np.min(recorded, axis=0).sum() / best) - 1)


def _affordable_passes(model: PreTrainedModel, decode: Decoding, batch: Sequence[Request]) -> int:
    """Return how many passes fit the budget; running them is also the warm-up."""
    start, passes = time.perf_counter(), 0
    for _ in islice(decode.decode(model, batch), MAX_PASSES):
        passes += 1
        if time.perf_counter() - start > BUDGET_S:
            break
    return passes


def _run(
    model: PreTrainedModel,
    decode: Decoding,
    batch: Sequence[Request],
    passes: int,
    recorder: Recorder | None,
) -> NDArray[np.float64]:
    """Return the seconds of each of the first `passes` passes; build and drop their records."""
    marks = [time.perf_counter()]
    with recorder or nullcontext():
        for number, step in enumerate(islice(decode.decode(model, batch), passes)):
            if recorder is not None:
                forward_records(number, step, recorder.take(step.num_tokens))
            marks.append(time.perf_counter())
    return np.diff(marks)
