"""Requests decoded together: their tokens, and their shares of a pass.

A row's own positions count from its prompt's first token. Rows are padded on the left so that they
run in lockstep; pads are never attended to, and have no share.

Shapes: B rows, n columns of a pass, T <= n tokens of a row in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled.trace.schema import Phase, Prediction, TokenState
from oled.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A tokenised prompt, and what forced decoding writes after it."""

    index: int
    prompt: Ints
    reference: Ints | None = None  # without the end token
    seed: int = 0  # of what is drawn at random for it


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One request's share of one pass; arrays are [T]."""

    request: int
    tokens: Ints  # which of the pass's B x n tokens these are
    positions: Ints
    token_ids: Ints  # as the model saw them
    state: NDArray[np.uint8]  # TokenState before the pass
    context: int  # own tokens in the cache before the pass
    confidence: Floats
    accepted: Bools  # in this pass
    written: tuple[tuple[int, int], ...] = ()  # position and token of what the pass decided
    produced: int = 0
    block: int = -1
    step: int = -1
    predictions: tuple[Prediction, ...] = ()  # what a draft says of the pass that verifies it


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One run of the model. Rows that wait or have ended were computed but have no share."""

    phase: Phase
    num_tokens: int  # B x n
    shares: tuple[Share, ...]


Announce = Callable[[Pass], None]
"""Callback run before each pass; confidences and accepted tokens are not set yet."""


def ignore_pass(_: Pass) -> None:
    """Ignore a coming pass."""


class Row:
    """A request while it is decoded. `length` positions are room for prompt and output."""

    def __init__(
        self,
        request: Request,
        new_tokens: int,
        length: int,
        script: Ints | None,
        mask_id: int = 0,
    ) -> None:
        start = len(request.prompt)
        self.request = request
        self.prompt_length = start
        self.end = start + new_tokens  # where output stops; sinks when an end token appears
        self.tokens = np.full(length, mask_id, dtype=np.int64)
        self.tokens[:start] = request.prompt
        self.open = np.arange(length) < start  # no longer masked
        self.script = script  # [length], what is written in place of the model's choice
        self.delivered = start  # everything before is final
        self.cached = 0

    @property
    def finished(self) -> bool:
        """Return whether all output is there, up to and including the end token or the limit."""
        return self.delivered == self.end

    def write(self, positions: Ints, choice: Ints) -> None:
        """Write tokens at these positions, which are masked no longer."""
        self.tokens[positions] = choice if self.script is None else self.script[positions]
        self.open[positions] = True

    def written(self, positions: Ints) -> tuple[tuple[int, int], ...]:
        """Return the positions with the tokens that now stand there."""
        return tuple((int(position), int(self.tokens[position])) for position in positions)

    def deliver(self, eos_ids: Sequence[int]) -> int:
        """Return how many tokens became final, in order, since the last call.

        Added up over a request this is the number of tokens up to and including the end token.
        """
        before = self.delivered
        while self.delivered < self.end and self.open[self.delivered]:
            if self.tokens[self.delivered] in eos_ids:
                self.end = self.delivered + 1
            self.delivered += 1
        return self.delivered - before

    def share(self, index: int, stop: int, columns: int) -> Share:
        """Return the share of the uncached positions up to `stop`, as row `index` of a pass."""
        here = slice(self.cached, stop)
        positions = np.arange(here.start, stop)
        state = np.where(self.open[here], TokenState.DECODED, TokenState.MASKED)
        state[positions < self.prompt_length] = TokenState.PROMPT
        return Share(
            request=self.request.index,
            tokens=(index + 1) * columns - len(positions) + np.arange(len(positions)),
            positions=positions,
            token_ids=self.tokens[here].copy(),
            state=state.astype(np.uint8),
            context=self.cached,
            confidence=np.full(len(positions), np.nan, dtype=np.float32),
            accepted=np.zeros(len(positions), dtype=bool),
        )


def columns_of(rows: Iterable[Row], stops: Sequence[int]) -> Ints:
    """Return the tokens [B, n] from the cached ones to `stops`, padded on the left with token 0."""
    pieces = [row.tokens[row.cached : stop] for row, stop in zip(rows, stops, strict=True)]
    columns = np.zeros((len(pieces), max(len(piece) for piece in pieces)), dtype=np.int64)
    for line, piece in zip(columns, pieces, strict=True):
        line[len(line) - len(piece) :] = piece
    return columns
