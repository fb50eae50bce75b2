"""Greedy decoding, one token a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oled.errors import UserError
from oled.running.decode.batch import (
    Announce,
    Pass,
    Request,
    Row,
    columns_of,
    ignore_pass,
)
from oled.running.decode.cache import CachedBatch
from oled.running.decode.common import Mode, choose, end_tokens, refuse_canvas, require, script_of
from oled.running.decode.watch import watch
from oled.trace.schema import ConfidenceKind, Phase


@dataclass(frozen=True, slots=True)
class Autoregressive:
    """Settings and factory of the greedy decoding loop.

    The confidence of a pass's last token is the probability of the token that the model chooses
    after it, whoever writes that one. The prefill chooses the first token, which is accepted there
    but not `produced`.
    """

    mode: Mode = Mode.FREE
    max_new_tokens: int = 256
    eos_ids: tuple[int, ...] | None = None  # None: the model's and the tokenizer's

    confidence_kind: ClassVar[ConfidenceKind] = ConfidenceKind.CHOSEN_PROBABILITY

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "0 or more")

    def resolve(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the settings with the end tokens filled in."""
        refuse_canvas(model)
        if not model.can_generate():
            raise UserError(
                f"'{model.config.model_type}' does not decode token by token: "
                f"use decode=block_diffusion"
            )
        return replace(self, eos_ids=end_tokens(self.eos_ids, model, tokenizer))

    def decode(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce = ignore_pass,
    ) -> Iterator[Pass]:
        """Decode a batch with resolved settings; yield after every run of the model."""
        if self.eos_ids is None:
            raise ValueError("resolve() the settings before decoding")
        return watch(self._passes(self.eos_ids, model, requests, announce))

    def _passes(
        self,
        eos_ids: tuple[int, ...],
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce,
    ) -> Iterator[Pass]:
        rows = [self._row(request, eos_ids) for request in requests]
        longest = max(row.prompt_length for row in rows)
        batch = CachedBatch(model, [longest - row.prompt_length for row in rows], block_length=1)
        phase = Phase.PREFILL
        while rows:
            stops = [row.delivered for row in rows]
            tokens = columns_of(rows, stops)
            coming = [
                row.share(index, stop, tokens.shape[1])
                for index, (row, stop) in enumerate(zip(rows, stops, strict=True))
            ]
            announce(Pass(phase, tokens.size, tuple(coming)))
            confidence, choice = choose(batch.run_last(tokens))  # [B]
            shares = []
            for index, (row, stop, share) in enumerate(zip(rows, stops, coming, strict=True)):
                row.cached = stop
                if not row.finished:
                    share.confidence[-1], share.accepted[-1] = confidence[index], True
                    row.write(np.array([stop]), choice[index : index + 1])
                    produced = row.deliver(eos_ids)
                    share = replace(
                        share,
                        written=row.written(np.array([stop])),
                        produced=produced if phase is Phase.DECODE else 0,
                    )
                shares.append(share)
            yield Pass(phase, tokens.size, tuple(shares))
            rows = batch.keep_unfinished(rows)
            phase = Phase.DECODE

    def _row(self, request: Request, eos_ids: tuple[int, ...]) -> Row:
        length = len(request.prompt) + self.max_new_tokens
        script = script_of(self.mode, request, length, eos_ids)
        return Row(request, self.max_new_tokens, length, script)
