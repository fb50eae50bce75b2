"""Held-out loss of a block-diffusion model on the answers of prompts: the any-order bound.

In every block of an answer m of its positions are masked, m uniform over 1..all of them, and the
model's probability of the true token is asked at each. One pass does a whole answer: clean blocks,
which see themselves and those before, and behind them the noisy blocks, each of which sees itself
and the clean blocks before it. That is what a denoising forward finds in its cache, so the loss is
that of decoding. The noise is the same for every model and every alteration.

Letters: S clean positions, q positions of the pass, L block length, n masked positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from oled.errors import UserError
from oled.running.alteration import Alteration, Group
from oled.running.decode import BlockDiffusion, Request
from oled.types import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """A model's losses and choices at the masked positions of one answer."""

    bits: NDArray[np.float64]  # [n] -log2 of the probability of the true token
    choice: Ints  # [n] the likeliest token
    truth: Ints  # [n]


def answer_losses(
    model: PreTrainedModel,
    requests: Iterable[Request],
    decode: BlockDiffusion,
    alteration: Alteration | None = None,
    *,
    seed: int = 0,
) -> list[Answered]:
    """Return one entry a request. Of `decode`, which is resolved, block length and token ids count.

    `alteration` must have been entered. Raises UserError for a request without an answer.
    """
    length, mask_id, eos_ids = decode.block_length, decode.mask_id, decode.eos_ids
    if length is None or mask_id is None or eos_ids is None:
        raise ValueError("resolve() the settings before measuring")
    if not eos_ids:
        raise UserError("a loss needs an end token: give decode.eos_ids")
    found = []
    for request in requests:
        answer = MaskedAnswer.of(request, length, eos_ids[0])
        if alteration is not None and alteration.begins_with_masks:
            _run(model, answer.layout(answer.maskable, mask_id), alteration)
        rng = np.random.default_rng((seed, request.index))
        layout = answer.layout(answer.noise(rng), mask_id)
        logits = _run(model, layout, alteration)[torch.from_numpy(layout.masked)].double()
        loss = -logits.log_softmax(-1) / np.log(2)
        bits = loss[torch.arange(len(layout.truth)), torch.from_numpy(layout.truth)]
        found.append(Answered(bits.numpy(), logits.argmax(-1).numpy(), layout.truth))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One answer's pass."""

    tokens: Ints  # [q] clean, then noisy
    positions: Ints  # [q]
    visible: NDArray[np.bool_]  # [q, q]
    groups: tuple[Group, ...]  # noisy and clean part of each block of the answer
    masked: Ints  # [n] where in the pass
    truth: Ints  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedAnswer:
    """A prompt and its answer in whole blocks, filled up with end tokens."""

    request: int
    clean: Ints  # [S]
    maskable: NDArray[np.bool_]  # [S] the answer and one end token; all masked at first
    length: int  # L
    first: int  # block in which the answer begins

    @classmethod
    def of(cls, request: Request, length: int, end: int) -> Self:
        if request.reference is None:
            raise UserError(
                f"prompt {request.index} has no reference answer: the held-out loss needs one"
            )
        start = len(request.prompt)
        known = np.concatenate((request.prompt, request.reference, [end]))
        clean = np.full(-(-len(known) // length) * length, end, dtype=np.int64)
        clean[: len(known)] = known
        position = np.arange(len(clean))
        maskable = (position >= start) & (position < len(known))
        return cls(request.index, clean, maskable, length, start // length)

    def noise(self, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Return masked positions [S], at least one in each block."""
        noise = np.zeros(len(self.clean), dtype=bool)
        for block in range(self.first, len(self.clean) // self.length):
            here = np.arange(block * self.length, (block + 1) * self.length)
            own = here[self.maskable[here]]
            noise[rng.permutation(own)[: rng.integers(1, len(own) + 1)]] = True
        return noise

    def layout(self, noise: NDArray[np.bool_], mask_id: int) -> Layout:
        """Return the pass: clean blocks, then the noisy ones."""
        size, noisy_from = len(self.clean), self.first * self.length
        noisy = np.where(noise, mask_id, self.clean)[noisy_from:]
        positions = np.concatenate((np.arange(size), np.arange(noisy_from, size)))
        block, is_noisy = positions // self.length, np.arange(len(positions)) >= size
        masked = np.flatnonzero(is_noisy & noise[positions])
        return Layout(
            tokens=np.concatenate((self.clean, noisy)),
            positions=positions,
            visible=_visible(block, is_noisy),
            groups=_groups(self.request, block, is_noisy, self.first),
            masked=masked,
            truth=self.clean[positions[masked]],
        )


def _visible(block: Ints, is_noisy: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which positions each position of the pass sees, [q, q]."""
    earlier = block[None, :] < block[:, None]
    same = (block[None, :] == block[:, None]) & (is_noisy[None, :] == is_noisy[:, None])
    visible: NDArray[np.bool_] = same | (earlier & ~is_noisy[None, :])
    return visible


def _groups(
    request: int, block: Ints, is_noisy: NDArray[np.bool_], first: int
) -> tuple[Group, ...]:
    """Return the blocks from `first` on, each noisy (as denoised) before clean (as committed).

    All of them are in one pass, so each counts as a request of its own.
    """
    return tuple(
        (np.flatnonzero((block == number) & (is_noisy == noisy)), (request << 32 | number, 0))
        for number in range(first, int(block.max()) + 1)
        for noisy in (True, False)
    )


@torch.inference_mode()
def _run(model: PreTrainedModel, layout: Layout, alteration: Alteration | None) -> Tensor:
    """Return logits [q, V] on the host."""
    if alteration is not None:
        alteration.expect(len(layout.tokens), layout.groups)
    device = model.device
    visible = torch.from_numpy(layout.visible).to(device)
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=device)
    logits: Tensor = model(
        input_ids=torch.from_numpy(layout.tokens).to(device)[None],
        position_ids=torch.from_numpy(layout.positions).to(device)[None],
        attention_mask=mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[None, None],
        use_cache=False,
    ).logits
    return logits[0].float().cpu()
