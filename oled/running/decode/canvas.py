"""One request's canvases: what is drawn, accepted and made noise again, and when a canvas ends.

Shapes: C tokens of a canvas, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits by which a token is accepted, and by which a canvas ends."""

    entropy_bound: float
    stability_threshold: int
    confidence_threshold: float


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The result of one pass over a canvas."""

    likeliest: Tensor  # [C] the text, if the canvas ends here
    accepted: Tensor  # [C] bool
    fresh: Tensor  # [C] bool, never accepted before
    following: Tensor  # [C] the canvas of the next pass
    ended: bool


class Canvases:
    """The canvases of one request, one after the other, and the random numbers for them."""

    def __init__(
        self, rules: Rules, length: int, vocabulary: int, seed: int, device: torch.device
    ) -> None:
        self._rules = rules
        self._shape = (length,)
        self._vocabulary = vocabulary
        self._random = torch.Generator(device).manual_seed(seed)
        self._before: list[Tensor] = []  # likeliest tokens of the last passes over this canvas
        self._fresh = torch.empty(0)

    def begin(self) -> Tensor:
        """Return a new canvas: tokens [C] of noise."""
        self._before = []
        self._fresh = torch.ones(self._shape, dtype=torch.bool, device=self._random.device)
        return self._noise()

    @torch.inference_mode()
    def step(self, scores: Tensor) -> Drawn:
        """Draw and accept tokens by one pass; float32 scores [C, V] are its tempered logits."""
        chances = scores.softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=self._random)[:, 0]
        likeliest = scores.argmax(-1)
        entropy = torch.special.entr(chances).sum(-1)
        accepted = self._accept(entropy)
        fresh, self._fresh = self._fresh, self._fresh & ~accepted
        following = torch.where(accepted, drawn, self._noise())
        return Drawn(likeliest, accepted, fresh, following, self._has_ended(likeliest, entropy))

    def _accept(self, entropy: Tensor) -> Tensor:
        ordered, index = entropy.sort()
        within = ordered.cumsum(0) - ordered <= self._rules.entropy_bound
        return torch.zeros_like(within).scatter(0, index, within)

    def _has_ended(self, likeliest: Tensor, entropy: Tensor) -> bool:
        count = self._rules.stability_threshold
        stable = len(self._before) == count and all(
            torch.equal(likeliest, before) for before in self._before
        )
        self._before = [*self._before, likeliest][-count:] if count else []
        return stable and bool(entropy.mean() < self._rules.confidence_threshold)

    def _noise(self) -> Tensor:
        where = self._random.device
        return torch.randint(self._vocabulary, self._shape, generator=self._random, device=where)
