"""Greedy decoding with a draft, several tokens verified in one pass of the model.

Source: DraftExpert (arXiv 2607.24434, summaries). The draft writes tokens one by one behind the
model's cache, then its keys and values are taken out again and one pass of the model computes all
drafted positions. The model's own tokens are followed for as long as they are those of the draft,
so the text is that of greedy decoding. *Reconstruction*: a pass verifies the positions at which the
draft has run, whose experts it has predicted; the token that it wrote last is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oled.errors import UserError
from oled.running.decode.autoregressive import Autoregressive
from oled.running.decode.batch import Announce, Pass, Request, Row, Share, ignore_pass
from oled.running.decode.cache import CachedBatch
from oled.running.decode.common import Mode, choose
from oled.running.decode.speculation import Drafting, VerifySet, refuse_batches
from oled.running.decode.watch import watch
from oled.running.drafting import Draft
from oled.trace.schema import Phase, TokenState
from oled.types import Ints


@dataclass(frozen=True, slots=True)
class SpeculativeAutoregressive(Autoregressive):
    """Greedy decoding, drafted and verified. One prompt at a time, and its own tokens only."""

    draft: Drafting = field(default_factory=Drafting)

    def resolve(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return settings with end tokens. Raises UserError where drafts can not be verified."""
        if self.mode is Mode.FORCED:
            raise UserError("decode.mode=forced decides every token: drafts need decode.mode=free")
        resolved = Autoregressive.resolve(self, model, tokenizer)
        if "sliding_attention" in (
            model.config.get_text_config().to_dict().get("layer_types") or ()
        ):
            raise UserError(
                f"'{model.config.model_type}' drops cached keys (sliding windows): rejected "
                f"drafts could not be removed; use decode=autoregressive"
            )
        Draft(model, self.draft.experts)
        return resolved

    def decode(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce = ignore_pass,
    ) -> Iterator[Pass]:
        """Decode one prompt with resolved settings; yield after every run of the model."""
        if self.eos_ids is None:
            raise ValueError("resolve() the settings before decoding")
        refuse_batches(requests)
        (request,) = requests
        return watch(_Loop(self, self.eos_ids, model, request, announce).passes())


def tokens_accepted(drafted: Sequence[int], written: Sequence[int]) -> int:
    """Return how many of the model's tokens count, 1..n.

    drafted: the tokens at the verified positions, the first is the model's; written: what the model
    writes behind each of them. A token counts if all before it were drafted.
    """
    count = 1
    while count < len(drafted) and written[count - 1] == drafted[count]:
        count += 1
    return count


class _Loop:
    """One request on its way."""

    def __init__(
        self,
        settings: SpeculativeAutoregressive,
        eos_ids: tuple[int, ...],
        model: PreTrainedModel,
        request: Request,
        announce: Announce,
    ) -> None:
        self.drafting, self.eos_ids, self.announce = settings.draft, eos_ids, announce
        length = len(request.prompt) + settings.max_new_tokens
        self.row = Row(request, settings.max_new_tokens, length, None)
        self.batch = CachedBatch(model, [0], block_length=1)
        self.draft = Draft(model, settings.draft.experts)

    def passes(self) -> Iterator[Pass]:
        row = self.row
        share = row.share(0, row.delivered, row.delivered)
        self.announce(Pass(Phase.PREFILL, len(share.tokens), (share,)))
        logits = self.batch.run_last(share.token_ids[None])
        yield self._follow(Phase.PREFILL, share, logits)
        while not row.finished:
            drafted: list[int] = []
            yield from self._drafts(drafted)
            share = self._share(drafted)
            self.announce(Pass(Phase.VERIFY, len(drafted), (share,)))
            logits = self.batch.run(share.token_ids[None], keep=True)[0]
            yield self._follow(Phase.VERIFY, share, logits)

    def _drafts(self, drafted: list[int]) -> Iterator[Pass]:
        """Run the draft; add the tokens at the positions to verify to `drafted`."""
        row, needs = self.row, VerifySet(self.drafting)
        token, reached, columns = int(row.tokens[row.cached]), 1.0, 0
        most = min(self.drafting.most, row.end - row.delivered)
        while len(drafted) < most and (not drafted or token not in self.eos_ids):
            share = self._share([token], behind=len(drafted))
            self.announce(Pass(Phase.DRAFT, 1, (share,)))
            with self.draft:
                logits = self.batch.run_last(share.token_ids[None])
            columns += 1
            confidence, choice = choose(logits)
            wanted, share = self.draft.wanted(), replace(share, confidence=confidence)
            kept = needs.keeps(reached, wanted.flags)
            if kept:
                drafted.append(token)
                share = replace(share, predictions=wanted.predictions)
            yield Pass(Phase.DRAFT, 1, (share,))
            if not kept:
                break
            token, reached = int(choice[0]), float(confidence[0])
        self.batch.drop(columns)

    def _follow(self, phase: Phase, share: Share, logits: Tensor) -> Pass:
        """Write the model's tokens along the last n positions, by their logits [n, V].

        Rejected drafts leave the cache.
        """
        row, (confidence, choice) = self.row, choose(logits)
        first = len(share.tokens) - len(choice)
        share.confidence[first:] = confidence
        count = tokens_accepted(share.token_ids[first:].tolist(), choice.tolist())
        written: list[tuple[int, int]] = []
        before = row.delivered
        while len(written) < count and not row.finished:
            column = len(written)
            position = share.positions[first + column : first + column + 1] + 1
            share.accepted[first + column] = True
            row.write(position, choice[column : column + 1])
            written += row.written(position)
            row.deliver(self.eos_ids)
        kept = max(1, len(written))
        row.cached += first + kept
        self.batch.drop(len(choice) - kept)
        produced = row.delivered - before if phase is Phase.VERIFY else 0
        share = replace(share, written=tuple(written), produced=produced)
        return Pass(phase, len(share.tokens), (share,))

    def _share(self, tokens: Sequence[int], behind: int = 0) -> Share:
        """Return the share of tokens `behind` positions after the cache, still undecided."""
        ids: Ints = np.array(tokens, dtype=np.int64)
        return Share(
            request=self.row.request.index,
            tokens=np.arange(len(ids)),
            positions=self.row.cached + behind + np.arange(len(ids)),
            token_ids=ids,
            state=np.full(len(ids), TokenState.DECODED, dtype=np.uint8),
            context=self.row.cached + behind,
            confidence=np.full(len(ids), np.nan, dtype=np.float32),
            accepted=np.zeros(len(ids), dtype=bool),
        )
