"""The cost in quality of an alteration of the routed experts: the model with and without it.

Two measurements. The held-out loss (`oled.quality.heldout`) and whether the likeliest token at its
masked positions stays the same: one step, same input. And free decoding, in which a first other
token makes others of all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.quality.heldout import Answered, answer_losses
from oled.running.alteration import Alteration
from oled.running.decode import BlockDiffusion, Decoding, Request, Speculative
from oled.running.decode.batch import ignore_pass
from oled.running.loading import LoadedModel
from oled.running.prompts import Prompt, tokenize
from oled.running.teacher_forcing import output_tokens
from oled.running.threads import threads_for
from oled.trace.schema import Phase

RESAMPLES = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One model: its losses, and what it wrote."""

    answered: tuple[Answered, ...]  # one a prompt
    written: tuple[tuple[int, ...], ...]  # tokens of each free answer; empty if not asked for
    denoising: int  # forwards of free decoding

    @property
    def bits(self) -> float:
        """Return the mean loss of a masked token."""
        return float(np.concatenate([one.bits for one in self.answered]).mean())

    @property
    def accuracy(self) -> float:
        """Return the share of masked tokens whose likeliest token is the true one."""
        return float(np.concatenate([one.choice == one.truth for one in self.answered]).mean())

    @property
    def tokens_per_forward(self) -> float | None:
        """Return tokens per denoising forward of free decoding."""
        tokens = sum(len(text) for text in self.written)
        return tokens / self.denoising if self.denoising else None


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """Both sides on the same prompts and the same noise."""

    plain: Side
    altered: Side

    @property
    def same_choice(self) -> float:
        """Return the share of masked positions at which the likeliest token is the same."""
        pairs = zip(self.plain.answered, self.altered.answered, strict=True)
        return float(np.concatenate([a.choice == b.choice for a, b in pairs]).mean())

    @property
    def same_tokens(self) -> float | None:
        """Return the share of positions of the longer free answer at which both have one token."""
        pairs = list(zip(self.plain.written, self.altered.written, strict=True))
        longest = sum(max(len(a), len(b)) for a, b in pairs)
        same = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
        return same / longest if longest else None

    def difference(self, seed: int = 0) -> tuple[float, float, float]:
        """Return bits a token more than the plain model, and 95 % of resamples of whole prompts."""
        pairs = zip(self.plain.answered, self.altered.answered, strict=True)
        more, count = np.array([((b.bits - a.bits).sum(), b.bits.size) for a, b in pairs]).T
        drawn = np.random.default_rng(seed).integers(more.size, size=(RESAMPLES, more.size))
        means: NDArray[np.float64] = more[drawn].sum(axis=1) / count[drawn].sum(axis=1)
        low, high = np.percentile(means, (2.5, 97.5))
        return float(more.sum() / count.sum()), float(low), float(high)

    def summary(self) -> dict[str, Any]:
        """Return flat figures."""
        more, low, high = self.difference()
        return {
            "prompts": len(self.plain.answered),
            "masked_tokens": sum(one.bits.size for one in self.plain.answered),
            "bits_per_token_plain": self.plain.bits,
            "bits_per_token": self.altered.bits,
            "bits_per_token_more": more,
            "bits_per_token_more_low": low,
            "bits_per_token_more_high": high,
            "accuracy_plain": self.plain.accuracy,
            "accuracy": self.altered.accuracy,
            "same_choice": self.same_choice,
            "same_tokens": self.same_tokens,
            "tokens_per_forward_plain": self.plain.tokens_per_forward,
            "tokens_per_forward": self.altered.tokens_per_forward,
        }

    def lines(self) -> list[str]:
        """Return the same in words."""
        found, (more, low, high) = self.summary(), self.difference()
        lines = [
            f"held-out loss, {found['prompts']} answers, {found['masked_tokens']} masked tokens: "
            f"{self.altered.bits:.4f} bits a token, {self.plain.bits:.4f} without; "
            f"{more:+.4f} ({low:+.4f} to {high:+.4f})",
            f"accuracy at masked tokens {self.altered.accuracy:.1%}, {self.plain.accuracy:.1%} "
            f"without; the same choice at {self.same_choice:.1%}",
        ]
        if self.same_tokens is not None:
            lines.append(
                f"free decoding: {self.same_tokens:.1%} of the tokens the same; "
                f"{found['tokens_per_forward']:.2f} tokens a denoising forward, "
                f"{found['tokens_per_forward_plain']:.2f} without"
            )
        return lines


def quality(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    decode: Decoding,
    alteration: Alteration,
    *,
    chat: bool | None = None,
    free: bool = True,
    seed: int = 0,
) -> Quality:
    """Measure a model with and without an alteration; `free`: let both decode the prompts too."""
    if not isinstance(decode, BlockDiffusion) or isinstance(decode, Speculative):
        raise UserError("quality is measured for block diffusion only: use decode=block_diffusion")
    settings = decode.resolve(loaded.model, loaded.tokenizer)
    requests = tokenize(prompts, loaded.tokenizer, chat=chat, seed=seed)
    with threads_for(loaded.model):
        plain, altered = (
            _measure(loaded, requests, settings, change, free, seed)
            for change in (None, alteration)
        )
    return Quality(plain, altered)


def _measure(
    loaded: LoadedModel,
    requests: Sequence[Request],
    settings: BlockDiffusion,
    alteration: Alteration | None,
    free: bool,
    seed: int,
) -> Side:
    with alteration or nullcontext():
        losses = answer_losses(loaded.model, requests, settings, alteration, seed=seed)
        announce = ignore_pass if alteration is None else alteration.announce
        runs = [
            list(settings.decode(loaded.model, [request], announce))
            for request in (requests if free else ())
        ]
    return Side(
        tuple(losses),
        tuple(tuple(output_tokens(passes)) for passes in runs),
        sum(one.phase is Phase.DENOISE for passes in runs for one in passes),
    )
