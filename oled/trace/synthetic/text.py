"""The text that a made-up model reads and writes: latents, block after block.

Letters: B block length, D latent dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oled.trace.synthetic.process import Process
from oled.types import Bools, Doubles, Floats, Ints


class Text:
    """One request's latents, block after block."""

    def __init__(self, process: Process, length: int, rng: np.random.Generator) -> None:
        self._process = process
        self._length = length
        self._rng = rng
        self._topic = process.request * rng.standard_normal(process.dimensions)
        self._theme = rng.standard_normal(process.dimensions)
        self._content = rng.standard_normal(process.dimensions)
        self._ease = float(rng.standard_normal())

    def next_block(self) -> Block:
        """Draw what the next block is about."""
        process, rng = self._process, self._rng
        self._theme = self._autoregress(self._theme, process.block_memory)
        contents, eases = [], []
        for _ in range(self._length):
            self._content = self._autoregress(self._content, process.position_memory)
            fresh = np.sqrt(1.0 - process.ease_memory**2) * float(rng.standard_normal())
            self._ease = process.ease_memory * self._ease + fresh
            contents.append(self._content)
            eases.append(self._ease)
        return Block(
            shared=self._topic + process.block * self._theme,
            content=(process.position * np.array(contents)).astype(np.float32),
            ease=np.array(eases),
            noise=rng.standard_normal((self._length, process.dimensions)),
        )

    def _autoregress(self, latent: Doubles, memory: float) -> Doubles:
        fresh = self._rng.standard_normal(self._process.dimensions)
        moved: Doubles = memory * latent + np.sqrt(1.0 - memory**2) * fresh
        return moved


@dataclass(slots=True)
class Block:
    """The latents of a block's tokens.

    From forward to forward only the noise changes, and the content of tokens written anew.
    """

    shared: Doubles  # [D]
    content: Floats  # [B, D]
    ease: Doubles  # [B]
    noise: Doubles  # [B, D]

    @property
    def length(self) -> int:
        return len(self.ease)

    def latents(self, process: Process) -> Floats:
        """Return what is visible of every token whatever its state: [B, D]."""
        return (self.shared + process.noise * self.noise).astype(np.float32)

    def confidence(
        self, process: Process, masked: Bools, unsettled: Bools, rng: np.random.Generator
    ) -> Doubles:
        """Draw how sure the model is of each token: [B]; less of masked and unsettled ones."""
        left: Ints = np.cumsum(masked) - masked  # masked positions to the left
        logit: Doubles = (
            process.confidence_base
            + process.confidence_ease * self.ease
            - process.confidence_left * np.sqrt(left)
            + process.confidence_noise * rng.standard_normal(self.length)
            + process.confidence_decoded * ~unsettled
        )
        result: Doubles = 1.0 / (1.0 + np.exp(-logit))
        return result

    def sureness(self, process: Process, rng: np.random.Generator) -> Doubles:
        """Draw how sure the model is of each token after all before it: [B]."""
        nothing = np.zeros(self.length, dtype=bool)
        return self.confidence(process, nothing, ~nothing, rng)

    def move_on(
        self,
        process: Process,
        masked: Bools,
        confidence: Doubles,
        edited: Bools,
        rng: np.random.Generator,
    ) -> None:
        """Move to the next forward: the noise drifts, most where the model is unsure."""
        unsure = process.drift_masked * (1.0 - confidence) ** process.drift_power
        speed = np.where(masked, unsure, process.drift_decoded)[:, None]
        fresh = rng.standard_normal(self.noise.shape)
        self.noise = np.sqrt(1.0 - speed**2) * self.noise + speed * fresh
        if edited.any():
            other = process.position * rng.standard_normal(self.content.shape)
            self.content = np.where(edited[:, None], other, self.content).astype(np.float32)
