"""How a made-up block is decoded: which tokens are accepted in which forward.

Threshold decoding as in LLaDA2.0 (every masked token above the threshold, the best one if there is
none), and with LLaDA2.1's editing: a decoded token can turn out wrong and is then written anew.
That a token accepted at confidence c is wrong with probability 1 - c is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oled.trace.synthetic.process import Process
from oled.trace.synthetic.text import Block
from oled.types import Bools, Doubles


@dataclass(frozen=True, slots=True)
class Decoding:
    """When a token is accepted, and when it is written anew."""

    threshold: float = 0.95
    edit_threshold: float | None = None  # None: decoded tokens stay
    post_edits: int = 16  # forwards that may only edit, once nothing is masked


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward over a block, as it begins."""

    masked: Bools  # [B]
    confidence: Doubles  # [B]
    accepted: Bools  # [B] masked tokens that this forward opens
    edited: Bools  # [B] decoded tokens that this forward writes anew

    @property
    def is_commit(self) -> bool:
        """Nothing is left to do: the block's keys and values are kept."""
        return not (self.masked.any() or self.edited.any())


def decode(
    block: Block, process: Process, decoding: Decoding, rng: np.random.Generator
) -> Iterator[Pass]:
    """Yield the forwards over a block until its commit; its latents move on between them."""
    masked = np.ones(block.length, dtype=bool)
    wrong = np.zeros(block.length, dtype=bool)
    post_edits = 0
    while True:
        confidence = block.confidence(process, masked, masked | wrong, rng)
        accepted = masked & (confidence > decoding.threshold)
        if masked.any() and not accepted.any():
            accepted[np.argmax(np.where(masked, confidence, -1.0))] = True
        edited = np.zeros_like(wrong)
        if decoding.edit_threshold is not None and post_edits < decoding.post_edits:
            edited = wrong & (confidence > decoding.edit_threshold)
        done = Pass(masked.copy(), confidence, accepted, edited)
        yield done
        if done.is_commit:
            return
        post_edits += not masked.any()
        if decoding.edit_threshold is not None:
            written = accepted | edited
            wrong = np.where(written, rng.random(block.length) > confidence, wrong)
        block.move_on(process, masked, confidence, edited, rng)
        masked &= ~accepted
