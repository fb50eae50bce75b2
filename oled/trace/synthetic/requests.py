"""The forwards of one made-up request: prefill, then block diffusion or token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oled.trace.schema import ForwardRecord, Phase, TokenState
from oled.trace.synthetic.decode import Decoding, decode
from oled.trace.synthetic.model import Model
from oled.trace.synthetic.text import Block, Text
from oled.types import Bools, Floats


@dataclass(frozen=True, slots=True)
class Workload:
    """How many requests, how long, and decoded how."""

    requests: int = 4
    prompt_blocks: int = 4  # prompt tokens in blocks; one prefill forward
    blocks: int = 8
    block_length: int = 16
    decoding: Decoding | None = field(default_factory=Decoding)  # None: token by token
    horizons: int = 0  # layers ahead for which next-gate predictions are made
    scores: int = 0  # router scores kept of each token, the best ones

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_blocks * self.block_length


def forwards_of(
    model: Model, workload: Workload, request: int, pass_id: int, rng: np.random.Generator
) -> Iterator[ForwardRecord]:
    """Yield one request's forwards, in order; `pass_id` is the number of the first."""
    text = Text(model.process, workload.block_length, rng)
    prompt = [text.next_block() for _ in range(workload.prompt_blocks)]
    writer = _Writer(model, workload, request, pass_id, rng)
    if prompt:
        yield _prefill(writer, prompt)
    context = workload.prompt_tokens
    for number in range(workload.blocks):
        block = text.next_block()
        if workload.decoding is None:
            yield from _token_by_token(writer, block, context, last=number == workload.blocks - 1)
        else:
            yield from _denoise(writer, block, workload.decoding, number, context)
        context += workload.block_length


def _prefill(writer: _Writer, prompt: list[Block]) -> ForwardRecord:
    """Run the prompt in one forward; token by token it also chooses the answer's first token."""
    model, process = writer.model, writer.model.process
    length = writer.workload.prompt_tokens
    latents = np.concatenate([block.latents(process) for block in prompt])
    own = model.project(np.concatenate([block.content for block in prompt]))
    confidence = np.full(length, np.nan)
    accepted = np.zeros(length, dtype=bool)
    if writer.workload.decoding is None:
        accepted[-1] = True
        confidence[-1] = prompt[-1].sureness(process, writer.rng)[-1]
    return writer.record(
        model.logits(latents, own, np.ones(length), np.zeros(length, dtype=bool)),
        phase=Phase.PREFILL,
        positions=np.arange(length),
        confidence=confidence,
        state=np.full(length, TokenState.PROMPT),
        accepted=accepted,
    )


def _denoise(
    writer: _Writer, block: Block, decoding: Decoding, number: int, context: int
) -> Iterator[ForwardRecord]:
    """Yield denoising forwards over one block, then its commit."""
    model, process = writer.model, writer.model.process
    own = model.project(block.content)
    for step, now in enumerate(decode(block, process, decoding, writer.rng)):
        yield writer.record(
            model.logits(block.latents(process), own, now.confidence, now.masked),
            phase=Phase.COMMIT if now.is_commit else Phase.DENOISE,
            positions=context + np.arange(block.length),
            confidence=now.confidence,
            state=np.where(now.masked, TokenState.MASKED, TokenState.DECODED),
            accepted=now.accepted,
            produced=int(now.accepted.sum()),
            block=number,
            step=-1 if now.is_commit else step,
            context=context,
        )
        if now.edited.any():
            own = model.project(block.content)


def _token_by_token(
    writer: _Writer, block: Block, context: int, *, last: bool
) -> Iterator[ForwardRecord]:
    """Yield a forward for each token of a block; that of the answer's last token is never run."""
    model, process = writer.model, writer.model.process
    nothing = np.zeros(block.length, dtype=bool)
    sure = block.sureness(process, writer.rng)
    logits = model.logits(
        block.latents(process), model.project(block.content), np.ones(block.length), nothing
    )
    for place in range(block.length - last):
        here = slice(place, place + 1)
        yield writer.record(
            logits[here],
            phase=Phase.DECODE,
            positions=context + np.arange(block.length)[here],
            confidence=sure[here],
            state=np.array([TokenState.DECODED]),
            accepted=np.ones(1, dtype=bool),
            produced=1,
            context=context + place,
        )


@dataclass(slots=True)
class _Writer:
    """What all forwards of a request share; numbers them."""

    model: Model
    workload: Workload
    request: int
    pass_id: int
    rng: np.random.Generator

    def record(self, logits: Floats, *, accepted: Bools, **fields: Any) -> ForwardRecord:
        """Route the tokens of one forward."""
        model, workload = self.model, self.workload
        ids, weights = model.route(logits)
        record = ForwardRecord(
            request=self.request,
            pass_id=self.pass_id,
            layers=model.layers,
            expert_ids=ids,
            weights=weights,
            token_ids=np.full(logits.shape[0], -1),
            accepted=accepted,
            predictions=model.predict(logits, workload.horizons, self.rng),
            scores=model.scores(logits, workload.scores),
            **fields,
        )
        self.pass_id += 1
        return record
