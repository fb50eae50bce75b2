"""The passes of a decoding once more: the same tokens through a model, whatever it says now.

So two models, or one with and without a change, are asked about the same inputs, each with a cache
of its own. Letters: n columns of a pass, m positions at which something was to be decided,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oled.running.decode import Announce, Pass, Request
from oled.running.decode.batch import ignore_pass
from oled.running.decode.cache import CachedBatch
from oled.trace.schema import Phase, TokenState
from oled.types import Ints


@dataclass(frozen=True, slots=True, eq=False)
class TeacherForcing:
    """A decoding loop that repeats `passes`, by request; confidences stay those of the first time.

    `log_probabilities` gets, by request, f32[m, V] at every position that was open.
    """

    passes: Mapping[int, Sequence[Pass]]
    block_length: int  # 1: autoregressive
    max_new_tokens: int
    log_probabilities: list[Tensor] = field(default_factory=list)

    def resolve(self, *_: Any) -> Self:
        """Return itself: nothing was left open."""
        return self

    def decode(
        self, model: PreTrainedModel, requests: Sequence[Request], announce: Announce = ignore_pass
    ) -> Iterator[Pass]:
        """Decode one request; yield after every run of the model."""
        (request,) = requests
        passes = self.passes[request.index]
        batch = CachedBatch(model, [0], self.block_length)
        likely = []
        for done, (rows, _) in zip(
            passes, open_positions(passes, len(request.prompt)), strict=True
        ):
            announce(done)
            logits = self._run(batch, done)
            if logits is not None:
                likely.append(logits[rows].float().log_softmax(-1).cpu())
            yield done
        self.log_probabilities.append(torch.cat(likely))

    def _run(self, batch: CachedBatch, done: Pass) -> Tensor | None:
        """Return logits [n, V] of the pass ([1, V] if autoregressive); None without the head."""
        tokens = done.shares[0].token_ids[None]
        if self.block_length == 1:
            return batch.run_last(tokens)
        if done.phase is Phase.PREFILL:
            batch.fill(tokens)
            return None
        return batch.run(tokens, keep=done.phase is Phase.COMMIT)[0]


def open_positions(passes: Sequence[Pass], prompt_length: int) -> list[tuple[Ints, Ints]]:
    """Return for each pass of a request the rows of its logits and the positions that they decide.

    Masked ones of a block, the next one of an autoregressive pass; none behind the output's end.
    """
    end = prompt_length + len(output_tokens(passes))
    found = []
    for done in passes:
        share = done.shares[0]
        if done.phase is Phase.DENOISE:
            rows = np.flatnonzero((share.state == TokenState.MASKED) & (share.positions < end))
            found.append((rows, share.positions[rows]))
            continue
        follows = share.positions[-1:] + 1
        decides = follows < end if share.block < 0 and share.written else np.zeros(1, bool)
        found.append((np.flatnonzero(decides), follows[decides]))
    return found


def output_tokens(passes: Sequence[Pass]) -> list[int]:
    """Return the tokens that one prompt's passes delivered, up to and including the end token."""
    written = tokens_written(passes)
    delivered = sum(done.shares[0].produced for done in passes)
    if passes[0].phase is Phase.PREFILL and passes[0].shares[0].written:
        delivered += 1  # the token that a prefill decides is not `produced`
    return [written[position] for position in sorted(written)][:delivered]


def tokens_written(passes: Sequence[Pass]) -> dict[int, int]:
    """Return the token at each position that one prompt's passes wrote."""
    written: dict[int, int] = {}
    for done in passes:
        written |= dict(done.shares[0].written)
    return written
