"""Block diffusion of canvases that begin as noise (DiffusionGemma's own generation).

An encoder reads the prompt and every finished canvas into the cache; a decoder over the same
weights denoises the next canvas behind it. A request gets the tokens that transformers' `generate`
for DiffusionGemma draws from the same seed.

Shapes: B rows, C tokens of a canvas, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oled.errors import UserError
from oled.running.decode.batch import Announce, Pass, Request, Row, Share, columns_of, ignore_pass
from oled.running.decode.cache import CachedCanvases
from oled.running.decode.canvas import Canvases, Rules
from oled.running.decode.common import canvas_length, choose, end_tokens, require
from oled.running.decode.watch import watch
from oled.trace.schema import ConfidenceKind, Phase
from oled.types import Floats


@dataclass(frozen=True, slots=True)
class CanvasDiffusion:
    """Settings and factory of the loop over canvases; the defaults are the published ones.

    A pass draws a token for every position of the canvas, at a temperature that falls from `t_max`
    to `t_min`. It accepts those of least entropy, as many as keep the sum of the entropies before
    them within `entropy_bound`, and makes noise of all others, accepted earlier or not. A canvas
    ends when its likeliest tokens are those of the last `stability_threshold` passes and their mean
    entropy is below `confidence_threshold`, or after `max_denoising_steps`; the likeliest tokens
    are its text then. Decoding stops after the canvas with the first end token; the last canvas is
    not encoded.

    A token counts as accepted in the pass that accepts it for the first time, the last at latest;
    its state says whether it is noise before a pass.

    The encoder has no logits: the tokens of a canvas keep their last confidence when they are
    encoded.
    """

    max_new_tokens: int = 256
    canvas_length: int | None = None  # None: the model's
    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    eos_ids: tuple[int, ...] | None = None  # None: the model's and the tokenizer's

    confidence_kind: ClassVar[ConfidenceKind] = ConfidenceKind.MAX_PROBABILITY

    def __post_init__(self) -> None:
        length, steps = self.canvas_length, self.max_denoising_steps
        require(self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "0 or more")
        require(length is None or length >= 2, "canvas_length", length, "at least 2, or null")
        require(steps >= 1, "max_denoising_steps", steps, "at least 1")
        require(self.entropy_bound >= 0, "entropy_bound", self.entropy_bound, "0 or more")
        require(0 < self.t_min <= self.t_max, "t_min", self.t_min, f"in 0..{self.t_max} (t_max)")
        require(
            self.stability_threshold >= 0,
            "stability_threshold",
            self.stability_threshold,
            "0 or more",
        )

    def resolve(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the settings with everything that was left open filled in."""
        length = canvas_length(model)
        if length is None:
            raise UserError(
                f"'{model.config.model_type}' denoises no canvas: use decode=block_diffusion or "
                f"decode=autoregressive"
            )
        return replace(
            self,
            canvas_length=self.canvas_length or length,
            eos_ids=end_tokens(self.eos_ids, model, tokenizer),
        )

    def decode(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce = ignore_pass,
    ) -> Iterator[Pass]:
        """Decode a batch with resolved settings; yield after every run of the model."""
        if self.canvas_length is None or self.eos_ids is None:
            raise ValueError("resolve() the settings before decoding")
        loop = _Loop(self, self.canvas_length, self.eos_ids, model, requests, announce)
        return watch(loop.passes(), most=self.max_denoising_steps)


class _Loop:
    """One batch on its way through the canvases; rows go from canvas to canvas together."""

    def __init__(
        self,
        settings: CanvasDiffusion,
        length: int,
        eos_ids: tuple[int, ...],
        model: PreTrainedModel,
        requests: Sequence[Request],
        announce: Announce,
    ) -> None:
        rules = Rules(
            settings.entropy_bound, settings.stability_threshold, settings.confidence_threshold
        )
        vocabulary = model.config.get_text_config().vocab_size
        self.announce, self.settings = announce, settings
        self.length, self.eos_ids = length, eos_ids
        self.rows = [self._row(request) for request in requests]
        self.canvases = {
            request.index: Canvases(rules, length, vocabulary, request.seed, model.device)
            for request in requests
        }
        self.confidence: dict[int, Floats] = {}  # of each request's last denoising pass
        longest = max(row.prompt_length for row in self.rows)
        self.cache = CachedCanvases(model, [longest - row.prompt_length for row in self.rows])

    def passes(self) -> Iterator[Pass]:
        yield self._prefill()
        self.rows = self.cache.keep_unfinished(self.rows)
        while self.rows:
            yield from self._denoise()
            self.rows = self.cache.keep_unfinished(self.rows)
            if self.rows:
                yield self._commit()

    def _row(self, request: Request) -> Row:
        canvases = -(-self.settings.max_new_tokens // self.length)
        length = len(request.prompt) + canvases * self.length
        return Row(request, self.settings.max_new_tokens, length, script=None)

    def _prefill(self) -> Pass:
        stops = [row.prompt_length for row in self.rows]
        columns = max(stops)
        shares = [row.share(i, stops[i], columns) for i, row in enumerate(self.rows)]
        return self._encode(Phase.PREFILL, stops, shares)

    def _commit(self) -> Pass:
        shares = [
            replace(self._share(i), confidence=self.confidence[row.request.index])
            for i, row in enumerate(self.rows)
        ]
        return self._encode(Phase.COMMIT, self._stops(), shares)

    def _encode(self, phase: Phase, stops: Sequence[int], shares: Sequence[Share]) -> Pass:
        tokens = columns_of(self.rows, stops)
        done = Pass(phase, tokens.size, tuple(shares))
        self.announce(done)
        self.cache.encode(tokens)
        for row, stop in zip(self.rows, stops, strict=True):
            row.cached = stop
        return done

    def _denoise(self) -> Iterator[Pass]:
        """Denoise one canvas of each row, pass by pass; a row whose canvas has ended waits."""
        for row, stop in zip(self.rows, self._stops(), strict=True):
            row.tokens[row.cached : stop] = self.canvases[row.request.index].begin().cpu().numpy()
        left = list(range(len(self.rows)))
        conditioning: Tensor | None = None
        for step in range(self.settings.max_denoising_steps):
            tokens = columns_of(self.rows, self._stops())
            coming = [replace(self._share(i), step=step) for i in left]
            self.announce(Pass(Phase.DENOISE, tokens.size, tuple(coming)))
            logits = self.cache.denoise(tokens, conditioning)
            conditioning = logits / self._temperature(step)
            confidence, _ = choose(logits)
            shares = [
                self._redraw(self.rows[i], replace(share, confidence=confidence[i]), scores, step)
                for i, share, scores in zip(left, coming, conditioning[left], strict=True)
            ]
            yield Pass(Phase.DENOISE, tokens.size, tuple(shares))
            left = [i for i, share in zip(left, shares, strict=True) if not share.written]
            if not left:
                return

    def _redraw(self, row: Row, share: Share, scores: Tensor, step: int) -> Share:
        """Return a row's share with what a pass over its canvas accepted and decided."""
        if not np.isfinite(share.confidence).all():
            return share  # nothing can be drawn from it: the watch ends the decoding
        drawn = self.canvases[share.request].step(scores)
        fresh = drawn.fresh.cpu().numpy()
        self.confidence[share.request] = share.confidence
        if not drawn.ended and step + 1 < self.settings.max_denoising_steps:
            accepted = drawn.accepted.cpu().numpy()
            row.tokens[share.positions] = drawn.following.cpu().numpy()
            row.open[share.positions] = accepted
            return replace(share, accepted=accepted & fresh)
        row.write(share.positions, drawn.likeliest.cpu().numpy())
        return replace(
            share,
            accepted=fresh,
            written=row.written(share.positions),
            produced=row.deliver(self.eos_ids),
        )

    def _temperature(self, step: int) -> float:
        settings = self.settings
        left = 1 - step / settings.max_denoising_steps
        return settings.t_min + (settings.t_max - settings.t_min) * left

    def _stops(self) -> list[int]:
        return [row.cached + self.length for row in self.rows]

    def _share(self, index: int) -> Share:
        row = self.rows[index]
        share = row.share(index, row.cached + self.length, self.length)
        return replace(share, block=(row.cached - row.prompt_length) // self.length)
