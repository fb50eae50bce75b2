"""Requests decoded together: their tokens, their shares of a pass, their common cache.

A row's own positions count from its prompt's first token. Rows are padded on the left so that they
run in lockstep; pads are never attended to, and have no share.

Shapes: B rows, n columns of a pass, T <= n tokens of a row in it, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from oled.trace.schema import Phase, TokenState

Ids = NDArray[np.int64]
Confidence = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A tokenised prompt, and what forced decoding writes after it."""

    index: int
    prompt: Ids
    reference: Ids | None = None  # without the end token


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One request's share of one pass; arrays are [T]."""

    request: int
    tokens: Ids  # which of the pass's B x n tokens these are
    positions: Ids
    token_ids: Ids  # as the model saw them
    state: NDArray[np.uint8]  # TokenState before the pass
    context_length: int  # own tokens in the cache before the pass
    confidence: Confidence
    accepted: Flags  # in this pass
    written: tuple[tuple[int, int], ...] = ()  # position and token of what the pass decided
    produced: int = 0
    block: int = -1
    step: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One run of the model. Rows that wait or have ended were computed but have no share."""

    phase: Phase
    num_tokens: int  # B x n
    shares: tuple[Share, ...]


Announce = Callable[[Pass], None]
"""Hears of each pass before it runs: its confidences are not known, and nothing is accepted yet."""


def unheard(_: Pass) -> None:
    """Nobody wants to know."""


class Row:
    """A request while it is decoded. `length` positions are room for prompt and output."""

    def __init__(
        self,
        request: Request,
        new_tokens: int,
        length: int,
        script: Ids | None,
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
        """All output is there, up to and including the end token or the limit."""
        return self.delivered == self.end

    def write(self, positions: Ids, choice: Ids) -> None:
        """Open these positions."""
        self.tokens[positions] = choice if self.script is None else self.script[positions]
        self.open[positions] = True

    def written(self, positions: Ids) -> tuple[tuple[int, int], ...]:
        """Positions with the tokens that now stand there."""
        return tuple((int(position), int(self.tokens[position])) for position in positions)

    def deliver(self, eos_ids: Sequence[int]) -> int:
        """How many tokens became final, in order, since the last call.

        Added up over a request this is the number of tokens up to and including the end token.
        """
        before = self.delivered
        while self.delivered < self.end and self.open[self.delivered]:
            if self.tokens[self.delivered] in eos_ids:
                self.end = self.delivered + 1
            self.delivered += 1
        return self.delivered - before

    def share(self, index: int, stop: int, columns: int) -> Share:
        """Positions from the cached ones to `stop`, as row number `index` in a pass."""
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
            context_length=self.cached,
            confidence=np.full(len(positions), np.nan, dtype=np.float32),
            accepted=np.zeros(len(positions), dtype=bool),
        )


def columns_of(rows: Iterable[Row], stops: Sequence[int]) -> Ids:
    """The tokens [B, n] from the cached ones to `stops`, padded on the left with token 0."""
    pieces = [row.tokens[row.cached : stop] for row, stop in zip(rows, stops, strict=True)]
    columns = np.zeros((len(pieces), max(len(piece) for piece in pieces)), dtype=np.int64)
    for line, piece in zip(columns, pieces, strict=True):
        line[len(line) - len(piece) :] = piece
    return columns


class CachedBatch:
    """A model with the cache of a batch of rows.

    Visibility is bidirectional inside a block and causal between blocks; `block_length` 1 is plain
    causal attention, which is left to the model (it may have sliding windows).
    """

    def __init__(self, model: PreTrainedModel, pads: Sequence[int], block_length: int) -> None:
        self._model = model
        self._block_length = block_length
        self._pads = torch.tensor(pads, device=model.device)
        self._cache = DynamicCache(config=model.config)
        self._length = 0  # columns in the cache, pads included

    @torch.inference_mode()
    def run(self, tokens: Ids, *, keep: bool) -> Tensor:
        """Logits [B, n, V] of tokens [B, n] behind the cache, which keeps them or not."""
        logits: Tensor = self._model(**self._inputs(tokens)).logits
        if keep:
            self._length += tokens.shape[1]
        else:
            self._cache.crop(-tokens.shape[1])
        return logits

    @torch.inference_mode()
    def run_last(self, tokens: Ids) -> Tensor:
        """Logits [B, V] of the last column; all columns go into the cache."""
        logits: Tensor = self._model(**self._inputs(tokens), logits_to_keep=1).logits
        self._length += tokens.shape[1]
        return logits[:, -1]

    @torch.inference_mode()
    def fill(self, tokens: Ids) -> None:
        """Run tokens [B, n] into the cache without the head, the larger part for a long prompt."""
        self._model.base_model(**self._inputs(tokens))
        self._length += tokens.shape[1]

    def keep_unfinished(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that go on; the others leave the cache."""
        left = [index for index, row in enumerate(rows) if not row.finished]
        if left and len(left) < len(rows):
            index = torch.tensor(left, device=self._pads.device)
            self._pads = self._pads[index]
            self._cache.batch_select_indices(index)
        return [rows[index] for index in left]

    def _inputs(self, tokens: Ids) -> dict[str, object]:
        stop = self._length + tokens.shape[1]
        columns = torch.arange(stop, device=self._pads.device)
        own = columns - self._pads[:, None]  # positions [B, stop], negative in pads
        return {
            "input_ids": torch.from_numpy(tokens).to(self._pads.device),
            "position_ids": own[:, self._length :].clamp(min=0),
            "attention_mask": self._mask(own),
            "cache": self._cache,
            "use_cache": True,
        }

    def _mask(self, own: Tensor) -> Tensor:
        """[B, stop] of 0 and 1 for block length 1, else additive [B, 1, n, stop]."""
        if self._block_length == 1:
            return (own >= 0).long()
        block = own // self._block_length
        visible = (block[:, None, :] <= block[:, self._length :, None]) & (own[:, None, :] >= 0)
        # a pad sees itself: a row of the mask without any visible key would give NaN
        itself = torch.eye(own.shape[1], dtype=torch.bool, device=own.device)
        visible |= itself[self._length :]
        mask = torch.zeros(visible.shape, dtype=self._model.dtype, device=own.device)
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[:, None]
