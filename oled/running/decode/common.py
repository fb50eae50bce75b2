"""Parts that the decoding loops share: end tokens, forced text, the greedy choice."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oled.errors import UserError
from oled.running.decode.batch import Request
from oled.types import Floats, Ints


class Mode(StrEnum):
    """The writer of the tokens; the model always chooses where they are written."""

    FREE = "free"  # the model
    FORCED = "forced"  # the reference answer


def require(allowed: bool, key: str, value: Any, what: str) -> None:
    """Raise UserError, which names the setting and what it must be, unless it is allowed."""
    if not allowed:
        raise UserError(f"decode.{key} is {value}; it must be {what}")


def canvas_length(model: PreTrainedModel) -> int | None:
    """Return the canvas length of a model that denoises canvases; None of any other."""
    length: int | None = model.config.to_dict().get("canvas_length")
    return length


def refuse_canvas(model: PreTrainedModel) -> None:
    """Raise UserError for a model that denoises canvases."""
    if canvas_length(model) is not None:
        raise UserError(
            f"'{model.config.model_type}' denoises whole canvases: use decode=canvas_diffusion"
        )


def end_tokens(
    given: tuple[int, ...] | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return the given end tokens, else those of tokenizer and model, the tokenizer's first."""
    if given is not None:
        return given
    known: list[Any] = [tokenizer.eos_token_id, model.config.get_text_config().eos_token_id]
    if model.can_generate():
        known.append(model.generation_config.eos_token_id)
    flat = [one for entry in known for one in (entry if isinstance(entry, Iterable) else (entry,))]
    return tuple(dict.fromkeys(int(one) for one in flat if one is not None))


def script_of(mode: Mode, request: Request, length: int, eos_ids: tuple[int, ...]) -> Ints | None:
    """Return what forced decoding writes at `length` positions: the reference, end tokens."""
    if mode is Mode.FREE:
        return None
    if request.reference is None:
        raise UserError(
            f"prompt {request.index} has no reference answer: decode.mode=forced needs one"
        )
    if not eos_ids:
        raise UserError("decode.mode=forced needs an end token: give decode.eos_ids")
    whole = np.concatenate((request.prompt, request.reference))
    script = np.full(max(length, len(whole)), eos_ids[0], dtype=np.int64)
    script[: len(whole)] = whole
    return script[:length]


@torch.inference_mode()
def choose(logits: Tensor, mask_id: int | None = None) -> tuple[Floats, Ints]:
    """Return probability and id of the likeliest token, never the mask; last dimension V."""
    logits = logits.float()
    if mask_id is not None:
        logits = logits.index_fill(-1, torch.tensor(mask_id, device=logits.device), -torch.inf)
    best = logits.softmax(-1).max(-1)
    return best.values.cpu().numpy(), best.indices.cpu().numpy()
