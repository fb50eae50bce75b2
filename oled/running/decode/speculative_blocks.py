"""Block diffusion with a draft: cheap denoising steps, verified by one pass of the model (ours).

DraftExpert (arXiv 2607.24434) drafts tokens of autoregressive text. Here a draft takes denoising
steps inside a block, which gives states of it, and one pass of the model computes all of them as
copies of the block over one cache. What the model would open in each, and with which tokens, is
followed for as long as it leads to the state that the draft has reached. So a verification makes at
least the step that plain decoding would have made, and the text is that of plain decoding with the
same settings. It may differ only where a decision hangs on rounding: a confidence as near to the
threshold, or to another position's, as sums of another order differ.

Shapes: L block length, n states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oled.running.decode.batch import Announce, Pass, Request, Row, Share, ignore_pass
from oled.running.decode.block_diffusion import BlockDiffusion, BlockIds, BlockLoop
from oled.running.decode.common import choose
from oled.running.decode.speculation import Drafting, VerifySet, refuse_batches
from oled.running.decode.watch import watch
from oled.running.drafting import Draft
from oled.trace.schema import Phase, TokenState
from oled.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class SpeculativeBlocks(BlockDiffusion):
    """Block diffusion, each block's steps drafted and verified. One prompt at a time.

    In forced mode a draft is judged by the positions that it opens alone.
    """

    draft: Drafting = field(default_factory=Drafting)

    def resolve(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return settings without gaps. Raises UserError for draft experts of another model."""
        Draft(model, self.draft.experts)
        return BlockDiffusion.resolve(self, model, tokenizer)

    def decode(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce = ignore_pass,
    ) -> Iterator[Pass]:
        """Decode one prompt with resolved settings; yield after every run of the model."""
        refuse_batches(requests)
        loop = SpeculativeLoop(self, *self.resolved(), model, requests, announce)
        return watch(loop.passes(), most=loop.length, must_open=True)


class State(NamedTuple):
    """A block on its way."""

    tokens: Ints  # [L]
    open: Bools  # [L]

    def same(self, other: State) -> bool:
        return np.array_equal(self.tokens, other.tokens) and np.array_equal(self.open, other.open)


def steps_accepted(states: Sequence[State], steps: Sequence[State]) -> int:
    """Return how many of the model's steps count, 1..n.

    states: where the draft has been, the first is where the model stands; steps: where the model
    gets from each of them. Its step from a state counts if its steps have led there.
    """
    count = 1
    while count < len(states) and steps[count - 1].same(states[count]):
        count += 1
    return count


class SpeculativeLoop(BlockLoop):
    """One request on its way through the blocks."""

    def __init__(
        self,
        settings: SpeculativeBlocks,
        length: int,
        ids: BlockIds,
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce,
    ) -> None:
        super().__init__(settings, length, ids, model, requests, announce)
        self.drafting = settings.draft
        self.draft = Draft(model, settings.draft.experts)

    def fill(self) -> Iterator[Pass]:
        (row,) = self.rows
        done = 0  # denoising steps of this block that plain decoding would have made by now
        while not self._is_full(row):
            base = replace(self._share(0, row), step=done)
            states: list[State] = []
            yield from self._drafts(row, base, states)
            verified = self._verify(row, base, states)
            done += int(verified.accepted.reshape(-1, self.length).any(axis=1).sum())
            yield Pass(Phase.VERIFY, len(verified.positions), (verified,))

    def _drafts(self, row: Row, base: Share, states: list[State]) -> Iterator[Pass]:
        """Run the draft; add the states to verify to `states`."""
        here = slice(row.cached, row.cached + self.length)
        state, reached = State(row.tokens[here].copy(), row.open[here].copy()), 1.0
        needs = VerifySet(self.drafting)
        while len(states) < self.drafting.most and not state.open.all():
            share = replace(_share_of(base, [state]), step=base.step + len(states))
            self.announce(Pass(Phase.DRAFT, self.length, (share,)))
            with self.draft:
                logits = self.batch.run(state.tokens[None], keep=False)
            confidence, choice = (x[0] for x in choose(logits, self.ids.mask))
            wanted, share = self.draft.wanted(), replace(share, confidence=confidence)
            kept = needs.keeps(reached, wanted.flags)
            if kept:
                states.append(state)
                share = replace(share, predictions=wanted.predictions)
            yield Pass(Phase.DRAFT, self.length, (share,))
            if not kept:
                return
            state, opened = self._step(row, state, confidence, choice)
            if not opened.any():
                return  # no further state to draft
            reached = float(confidence[opened].min())

    def _verify(self, row: Row, base: Share, states: Sequence[State]) -> Share:
        """Run the model on all states in one pass; open what it decides along the accepted ones."""
        coming = _share_of(base, states)
        self.announce(Pass(Phase.VERIFY, len(coming.positions), (coming,)))
        logits = self.batch.run_states(np.stack([state.tokens for state in states]))
        confidence, choice = choose(logits, self.ids.mask)
        steps = [self._step(row, *one) for one in zip(states, confidence, choice, strict=True)]
        count = steps_accepted(states, [state for state, _ in steps])
        accepted = np.zeros((len(states), self.length), dtype=bool)
        written: list[tuple[int, int]] = []
        for number in range(count):
            _, accepted[number] = steps[number]
            opened = base.positions[accepted[number]]
            row.write(opened, choice[number, accepted[number]])
            written += row.written(opened)
        return replace(
            coming,
            confidence=confidence.ravel(),
            accepted=accepted.ravel(),
            written=tuple(written),
            produced=row.deliver(self.ids.eos),
        )

    def _step(
        self, row: Row, state: State, confidence: Floats, choice: Ints
    ) -> tuple[State, Bools]:
        """Return the state after a decision, and the positions [L] that it opens."""
        opened = self._accept(~state.open, confidence)
        if row.script is not None:
            choice = row.script[row.cached : row.cached + self.length]
        return State(np.where(opened, choice, state.tokens), state.open | opened), opened


def _share_of(base: Share, states: Sequence[State]) -> Share:
    """Return the share of a pass over these states of the block of `base`."""
    number = len(states)
    opened = np.concatenate([state.open for state in states])
    prompt = np.tile(base.state == TokenState.PROMPT, number)
    state = np.where(opened, TokenState.DECODED, TokenState.MASKED)
    state[prompt] = TokenState.PROMPT
    return replace(
        base,
        tokens=np.arange(len(opened)),
        positions=np.tile(base.positions, number),
        token_ids=np.concatenate([state.tokens for state in states]),
        state=state.astype(np.uint8),
        confidence=np.full(len(opened), np.nan, dtype=np.float32),
        accepted=np.zeros(len(opened), dtype=bool),
    )
