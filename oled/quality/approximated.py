"""Logits and text under a policy that approximates misses, beside those of the exact model.

Two measurements, both of models that run with offloaded experts. *The same inputs*: the exact model
decodes along the reference answers, and its passes are repeated under the policy; compared are the
distributions at every masked position (of autoregressive text, at every next token). *Free text*:
each decodes by itself. The exact model is the same executor under a policy that copies every miss,
whose logits are bitwise those of the resident model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from oled.errors import UserError
from oled.live.decoded import LiveRun
from oled.policies.composition import Composition, load_composition
from oled.quality.heldout import Answered
from oled.quality.measure import Quality, Side
from oled.running.decode import (
    Autoregressive,
    BlockDiffusion,
    CanvasDiffusion,
    Decoding,
    Mode,
    Pass,
)
from oled.running.loading import LoadedModel
from oled.running.prompts import Prompt, tokenize
from oled.running.teacher_forcing import (
    TeacherForcing,
    open_positions,
    output_tokens,
    tokens_written,
)
from oled.trace.schema import Phase
from oled.types import Ints

EXACT = "lru"
SURROGATES, NOTHING = "surrogates", "nothing"
"""What stands in for an expert that is given up; the second is a control."""

Live = Callable[[Composition, Any, bool], LiveRun]
"""Decode the prompts live: policy, decoding loop, and whether surrogates stand in."""


@dataclass(frozen=True, slots=True, eq=False)
class Approximation:
    """One way of giving misses up, beside the exact model."""

    quality: Quality
    kl_bits: float  # mean over positions, of the exact model's distribution against this one
    dropped_gate_share: float  # on the same inputs

    def summary(self) -> dict[str, Any]:
        """Return flat figures."""
        return {
            "dropped_gate_share": self.dropped_gate_share,
            "kl_bits": self.kl_bits,
            **self.quality.summary(),
        }

    def lines(self) -> list[str]:
        """Return the same in words."""
        found = self.summary()
        more = [found[f"bits_per_token_more{end}"] for end in ("", "_low", "_high")]
        return [
            f"same inputs: {self.dropped_gate_share:.2%} of the gate mass given up; KL "
            f"{self.kl_bits:.4f} bits, the same choice at {found['same_choice']:.1%} of "
            f"{found['masked_tokens']} open positions; held-out bits a token "
            f"{found['bits_per_token']:.4f}, {found['bits_per_token_plain']:.4f} exact; "
            "{:+.4f} ({:+.4f} to {:+.4f})".format(*more),
            f"free text: {found['same_tokens']:.1%} of the tokens the same",
        ]


def comparable(prompts: Sequence[Prompt], decode: Decoding) -> BlockDiffusion | Autoregressive:
    """Return the loop. Raises UserError where what it writes can not be compared."""
    plain = type(decode) in (BlockDiffusion, Autoregressive)
    if not plain or isinstance(decode, CanvasDiffusion):
        raise UserError("quality=true compares plain block diffusion or autoregressive decoding")
    if any(prompt.reference is None for prompt in prompts):
        raise UserError(
            "quality=true needs prompts with reference answers; quality=false runs without"
        )
    return decode


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """The model that every way of giving misses up is compared with."""

    loop: Callable[[], TeacherForcing]  # along the reference answers, as it decoded them
    log_probabilities: list[Tensor]  # by prompt, at the open positions
    truths: list[Ints]  # by prompt, the tokens that are there in the end
    side: Side
    decoding: BlockDiffusion | Autoregressive

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        prompts: Sequence[Prompt],
        decode: BlockDiffusion | Autoregressive,
        live: Live,
    ) -> Self:
        decoding = decode.resolve(loaded.model, loaded.tokenizer)
        block = 1 if isinstance(decoding, Autoregressive) else decoding.block_length
        if block is None:
            raise ValueError("resolve() the settings before decoding")
        policy = load_composition(EXACT)
        guide = live(policy, replace(decoding, mode=Mode.FORCED), True)
        lengths = {r.index: len(r.prompt) for r in tokenize(prompts, loaded.tokenizer)}
        requests = _by_request(guide.passes)
        truths = [_truth(passes, lengths[index]) for index, passes in requests.items()]

        def loop() -> TeacherForcing:
            return TeacherForcing(requests, block, decoding.max_new_tokens)

        again = loop()
        live(policy, again, True)
        side = _side(again.log_probabilities, truths, live(policy, decoding, True))
        return cls(loop, again.log_probabilities, truths, side, decoding)


def approximations(
    exact: Exact, composition: Composition, live: Live, free: LiveRun
) -> dict[str, Approximation]:
    """Compare SURROGATES and NOTHING with the exact model. `free`: the policy's own text."""
    found = {}
    for name in (SURROGATES, NOTHING):
        stand_in, along = name == SURROGATES, exact.loop()
        run = live(composition, along, stand_in)
        wrote = free if stand_in else live(composition, exact.decoding, False)
        found[name] = Approximation(
            Quality(exact.side, _side(along.log_probabilities, exact.truths, wrote)),
            _kl_bits(exact.log_probabilities, along.log_probabilities),
            float(run.rates["dropped_gate_share"] or 0.0),
        )
    return found


def _by_request(passes: Sequence[Pass]) -> dict[int, list[Pass]]:
    found: dict[int, list[Pass]] = {}
    for done in passes:
        found.setdefault(done.shares[0].request, []).append(done)
    return found


def _truth(passes: Sequence[Pass], prompt_length: int) -> Ints:
    """Return the tokens that the passes' open positions have in the end."""
    tokens = tokens_written(passes)
    positions = np.concatenate([where for _, where in open_positions(passes, prompt_length)])
    return np.array([tokens[position] for position in positions.tolist()], np.int64)


def _side(log_probabilities: Sequence[Tensor], truths: Sequence[Ints], free: LiveRun) -> Side:
    answered = []
    for likely, truth in zip(log_probabilities, truths, strict=True):
        bits = -likely[torch.arange(len(truth)), torch.from_numpy(truth)].double() / np.log(2)
        answered.append(Answered(bits.numpy(), likely.argmax(-1).numpy(), truth))
    written = [tuple(output_tokens(passes)) for passes in _by_request(free.passes).values()]
    deciding = sum(done.phase in (Phase.DENOISE, Phase.DECODE) for done in free.passes)
    return Side(tuple(answered), tuple(written), deciding)


def _kl_bits(exact: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    p, q = torch.cat(list(exact)).double(), torch.cat(list(other)).double()
    return float((p.exp() * (p - q)).sum(-1).mean() / np.log(2))
