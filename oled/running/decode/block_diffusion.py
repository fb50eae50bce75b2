"""Greedy block-diffusion decoding (the published loop of LLaDA2 and SDAR, with a KV cache)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oled.errors import UserError
from oled.running.decode.batch import Announce, Pass, Request, Row, Share, columns_of, ignore_pass
from oled.running.decode.cache import CachedBatch
from oled.running.decode.common import Mode, choose, end_tokens, refuse_canvas, require, script_of
from oled.running.decode.watch import watch
from oled.trace.schema import ConfidenceKind, Phase
from oled.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class BlockDiffusion:
    """Settings and factory of the block-diffusion loop; L = `block_length`.

    Blocks are aligned to absolute positions, so a prompt's tail shares the first generated block.
    Whole prompt blocks are prefilled in one pass; a block is denoised until nothing is masked, then
    committed to the cache by one more pass. A pass accepts every masked position whose confidence
    is above `threshold` but at least one, or the `tokens_per_forward` most confident. Decoding
    stops after the block with the first end token. With `max_new_tokens` 0 the prompt is prefilled,
    tail included, and that is all.

    Rows of a batch go from block to block together: a row whose block is full waits for the commit,
    without a share in the passes between.
    """

    block_length: int | None = None  # None: the model's
    threshold: float = 0.95
    mode: Mode = Mode.FREE
    max_new_tokens: int = 256
    tokens_per_forward: int | None = None
    mask_id: int | None = None  # None: the model's or the tokenizer's
    eos_ids: tuple[int, ...] | None = None  # None: the model's and the tokenizer's

    confidence_kind: ClassVar[ConfidenceKind] = ConfidenceKind.MAX_PROBABILITY

    def __post_init__(self) -> None:
        count, length = self.tokens_per_forward, self.block_length
        require(length is None or length >= 2, "block_length", length, "at least 2, or null")
        require(0 <= self.threshold <= 1, "threshold", self.threshold, "in 0..1")
        require(self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "0 or more")
        require(count is None or count >= 1, "tokens_per_forward", count, "at least 1, or null")

    def resolve(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the settings with everything that was left open filled in."""
        refuse_canvas(model)
        facts, kind = model.config.to_dict(), model.config.model_type
        known = (self.mask_id, facts.get("mask_token_id"), tokenizer.mask_token_id)
        mask_id = next((token for token in known if token is not None), None)
        if mask_id is None:
            raise UserError(
                f"neither '{kind}' nor its tokenizer names a mask token: give decode.mask_id, or "
                f"use decode=autoregressive"
            )
        length = self.block_length or facts.get("block_length")
        if length is None:
            raise UserError(f"'{kind}' names no length of a block: give decode.block_length")
        return replace(
            self,
            block_length=length,
            mask_id=mask_id,
            eos_ids=end_tokens(self.eos_ids, model, tokenizer),
        )

    def decode(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce = ignore_pass,
    ) -> Iterator[Pass]:
        """Decode a batch with resolved settings; yield after every run of the model."""
        loop = BlockLoop(self, *self.resolved(), model, requests, announce)
        return watch(loop.passes(), most=loop.length, must_open=True)

    def resolved(self) -> tuple[int, BlockIds]:
        """Return block length and token ids. Raises ValueError before `resolve`."""
        if self.block_length is None or self.mask_id is None or self.eos_ids is None:
            raise ValueError("resolve() the settings before decoding")
        return self.block_length, BlockIds(self.mask_id, self.eos_ids)


class BlockIds(NamedTuple):
    mask: int
    eos: tuple[int, ...]


class BlockLoop:
    """One batch on its way through the blocks."""

    def __init__(
        self,
        settings: BlockDiffusion,
        length: int,
        ids: BlockIds,
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce,
    ) -> None:
        self.announce = announce
        self.settings, self.length, self.ids = settings, length, ids
        self.rows = [self._row(request) for request in requests]
        self.stops = [self._prefilled(row) for row in self.rows]
        pads = [max(self.stops) - stop for stop in self.stops]
        self.batch = CachedBatch(model, pads, self.length)

    def passes(self) -> Iterator[Pass]:
        if max(self.stops):
            yield self._prefill()
        while rows := self.batch.keep_unfinished(self.rows):
            self.rows = rows
            yield from self.fill()
            yield self._commit()

    def fill(self) -> Iterator[Pass]:
        """Denoise the block at hand until nothing in it is masked."""
        step = 0
        while not all(self._is_full(row) for row in self.rows):
            yield self._denoise(step)
            step += 1

    def _row(self, request: Request) -> Row:
        new_tokens = self.settings.max_new_tokens
        blocks = -(-(len(request.prompt) + new_tokens) // self.length)
        script = script_of(self.settings.mode, request, blocks * self.length, self.ids.eos)
        return Row(request, new_tokens, blocks * self.length, script, self.ids.mask)

    def _prefilled(self, row: Row) -> int:
        """Return how much of a prompt to prefill: whole blocks, or all where nothing follows."""
        whole = row.prompt_length // self.length * self.length
        return row.prompt_length if row.finished else whole

    def _prefill(self) -> Pass:
        tokens = columns_of(self.rows, self.stops)
        shares = [
            row.share(index, stop, tokens.shape[1])
            for index, (row, stop) in enumerate(zip(self.rows, self.stops, strict=True))
            if stop > 0
        ]
        prefill = Pass(Phase.PREFILL, tokens.size, tuple(shares))
        self.announce(prefill)
        self.batch.fill(tokens)
        for row, stop in zip(self.rows, self.stops, strict=True):
            row.cached = stop
        return prefill

    def _denoise(self, step: int) -> Pass:
        coming = {
            index: replace(self._share(index, row), step=step)
            for index, row in enumerate(self.rows)
            if not self._is_full(row)
        }
        confidence, choice = self._run(Phase.DENOISE, coming.values(), keep=False)
        shares = [
            self._open(self.rows[i], replace(share, confidence=confidence[i]), choice[i])
            for i, share in coming.items()
        ]
        return Pass(Phase.DENOISE, choice.size, tuple(shares))

    def _commit(self) -> Pass:
        coming = [self._share(index, row) for index, row in enumerate(self.rows)]
        confidence, choice = self._run(Phase.COMMIT, coming, keep=True)
        shares = [replace(share, confidence=confidence[i]) for i, share in enumerate(coming)]
        for row in self.rows:
            row.cached += self.length
        return Pass(Phase.COMMIT, choice.size, tuple(shares))

    def _run(self, phase: Phase, coming: Iterable[Share], *, keep: bool) -> tuple[Floats, Ints]:
        """Run the model; return confidence and choice [B, L] at every position, decoded or not."""
        tokens = columns_of(self.rows, [row.cached + self.length for row in self.rows])
        self.announce(Pass(phase, tokens.size, tuple(coming)))
        return choose(self.batch.run(tokens, keep=keep), self.ids.mask)

    def _is_full(self, row: Row) -> bool:
        return bool(row.open[row.cached : row.cached + self.length].all())

    def _share(self, index: int, row: Row) -> Share:
        share = row.share(index, row.cached + self.length, self.length)
        return replace(share, block=row.cached // self.length)

    def _open(self, row: Row, share: Share, choice: Ints) -> Share:
        accepted = self._accept(~row.open[share.positions], share.confidence)
        opened = share.positions[accepted]
        row.write(opened, choice[accepted])
        return replace(
            share,
            accepted=accepted,
            written=row.written(opened),
            produced=row.deliver(self.ids.eos),
        )

    def _accept(self, masked: Bools, confidence: Floats) -> Bools:
        """Return which masked positions [L] to open: the most confident ones, at least one."""
        count = self.settings.tokens_per_forward
        if count is None:
            count = max(1, int((masked & (confidence > self.settings.threshold)).sum()))
        best = np.argsort(np.where(masked, -confidence, np.inf), kind="stable")[:count]
        accepted = np.zeros_like(masked)
        accepted[best] = True
        return accepted & masked
