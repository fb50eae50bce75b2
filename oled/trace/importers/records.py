"""Forward records of recordings that say little more than ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oled.trace.schema import MAX_TOKENS, ForwardRecord, Phase, RouterScores, TokenState
from oled.types import Array, Bools


def plain_record(
    pass_id: int,
    phase: Phase,
    layers: Array,
    expert_ids: Array,
    *,
    request: int = 0,
    weights: Array | None = None,
    positions: Array | None = None,
    token_ids: Array | None = None,
    context: int = 0,
    state: Array | None = None,
    accepted: Array | None = None,
    produced: int = 0,
    row_tokens: tuple[Array, ...] | None = None,
    scores: RouterScores | None = None,
) -> ForwardRecord:
    """Make a record of ids [Lr, T, k]; whatever is not given is unknown.

    Accepted are, unless given, the tokens of decoding (each chose the next one).
    """
    tokens = expert_ids.shape[1]
    decode = phase is Phase.DECODE
    if accepted is None:
        accepted = np.full(tokens, int(decode), dtype=np.uint8)
    if state is None:
        state = np.full(tokens, TokenState.DECODED if decode else TokenState.PROMPT)
    if weights is None:
        weights = np.zeros(expert_ids.shape, dtype=np.float32)
    return ForwardRecord(
        request=request,
        pass_id=pass_id,
        phase=phase,
        layers=layers,
        expert_ids=expert_ids,
        weights=weights,
        positions=context + np.arange(tokens) if positions is None else positions,
        token_ids=np.full(tokens, -1) if token_ids is None else token_ids,
        confidence=np.full(tokens, np.nan),
        state=state,
        accepted=accepted,
        context=context,
        produced=produced,
        row_tokens=row_tokens,
        scores=scores,
    )


def chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield a range of tokens in pieces that one forward can hold."""
    for at in range(begin, end, MAX_TOKENS):
        yield at, min(at + MAX_TOKENS, end)


def row_tokens(present: Bools) -> tuple[Array, ...] | None:
    """Return each layer's tokens that have rows, from bool[Lr, T]; None where all have."""
    if present.all():
        return None
    return tuple(np.flatnonzero(row) for row in present)
