"""What recording costs: the same passes with and without it, on the run's own first batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice

from transformers import PreTrainedModel

from oled.record.decode import Autoregressive, BlockDiffusion, Request
from oled.record.recorder import Recorder
from oled.record.records import forward_records

MAX_PASSES = 48
BUDGET_S = 1.5  # of each of the four rounds after the first
ROUNDS = 2


def hook_overhead(
    model: PreTrainedModel,
    decode: BlockDiffusion | Autoregressive,
    batch: Sequence[Request],
    recorder: Recorder,
) -> float:
    """Time added by hooks, copies and the building of records, as a fraction of plain decoding.

    Greedy decoding repeats itself, so both runs make the same passes; the best of the rounds
    counts, alternating, because the first ones warm up and others may use the machine.
    """
    passes = _affordable_passes(model, decode, batch)
    plain, recorded = float("inf"), float("inf")
    for _ in range(ROUNDS):
        plain = min(plain, _run(model, decode, batch, passes, None))
        recorded = min(recorded, _run(model, decode, batch, passes, recorder))
    return max(0.0, recorded / plain - 1)


def _affordable_passes(
    model: PreTrainedModel, decode: BlockDiffusion | Autoregressive, batch: Sequence[Request]
) -> int:
    """Passes that fit the budget; also the warm-up."""
    start, passes = time.perf_counter(), 0
    for _ in islice(decode.decode(model, batch), MAX_PASSES):
        passes += 1
        if time.perf_counter() - start > BUDGET_S:
            break
    return passes


def _run(
    model: PreTrainedModel,
    decode: BlockDiffusion | Autoregressive,
    batch: Sequence[Request],
    passes: int,
    recorder: Recorder | None,
) -> float:
    """Seconds for the first `passes` passes; their records are built and dropped."""
    with recorder or nullcontext():
        start = time.perf_counter()
        for number, step in enumerate(islice(decode.decode(model, batch), passes)):
            if recorder is not None:
                forward_records(number, step, recorder.take(step.num_tokens))
        return time.perf_counter() - start
