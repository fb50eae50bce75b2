"""What a model can not decode, said before the first pass."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from oled.errors import UserError
from oled.running.decode import BlockDiffusion, Decoding, Request


def refuse_unfit(model: PreTrainedModel, requests: Sequence[Request], decode: Decoding) -> None:
    """Refuse prompts that are too long, and token ids that the model does not have."""
    facts = model.config.get_text_config().to_dict()
    for request in requests:
        _refuse_length(request, facts.get("max_position_embeddings"), decode.max_new_tokens)
        _refuse_tokens(request, facts["vocab_size"])
    if isinstance(decode, BlockDiffusion) and decode.mask_id not in range(facts["vocab_size"]):
        raise UserError(
            f"decode.mask_id is {decode.mask_id}; the model has {facts['vocab_size']} tokens"
        )


def _refuse_length(request: Request, positions: int | None, new_tokens: int) -> None:
    if positions is not None and len(request.prompt) + new_tokens > positions:
        raise UserError(
            f"prompt {request.index} has {len(request.prompt)} tokens, with "
            f"decode.max_new_tokens={new_tokens} more than the model's {positions} positions"
        )


def _refuse_tokens(request: Request, vocabulary: int) -> None:
    for name, ids in (("prompt", request.prompt), ("reference of prompt", request.reference)):
        if ids is not None and len(ids) and ids.max() >= vocabulary:
            raise UserError(
                f"{name} {request.index} holds token {ids.max()}, the model has {vocabulary}: the "
                f"tokenizer is another model's"
            )
