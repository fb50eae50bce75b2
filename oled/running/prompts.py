"""Prompts and reference answers from JSONL files, and their tokens.

Known fields: GSM8K's `question`/`answer`, HumanEval's `prompt`/`canonical_solution`, and plain
`prompt` or `text` with an optional `reference`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oled.errors import UserError
from oled.running.decode import BlockDiffusion, Decoding, Request

# field of the prompt, field of its reference, form of the prompt and of the reference without chat
_FORMS = (
    ("question", "answer", "Question: {}\nAnswer:", " {}"),
    ("prompt", "canonical_solution", "{}", "{}"),
    ("prompt", "reference", "{}", "{}"),
    ("text", "reference", "{}", "{}"),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and the answer that forced decoding writes."""

    message: str  # as in the file: the user's turn of a chat
    text: str  # for models without a chat template
    answer: str | None  # as in the file
    reference: str | None  # the text that continues `text`
    source: str  # file name and line

    @property
    def sha256(self) -> str:
        """Return the hash of the message."""
        return hashlib.sha256(self.message.encode()).hexdigest()


def plain_prompt(text: str, reference: str | None = None, source: str = "api") -> Prompt:
    """Return a prompt that is used word for word."""
    return Prompt(text, text, reference, reference, source)


def load_prompts(path: str | Path, *, skip: int = 0, limit: int | None = None) -> list[Prompt]:
    """Load the lines from `skip` + 1 on of a JSONL file, at most `limit`."""
    file = Path(path)
    if skip < 0 or (limit is not None and limit < 1):
        raise UserError(f"skip={skip} limit={limit}: use 0 or more, and at least 1 or null")
    try:
        # JSON's strings may hold other line ends than the one between its lines
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={file} can not be read: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    stop = None if limit is None else skip + limit
    prompts = [_parse(file, number, line) for number, line in numbered[skip:stop]]
    if not prompts:
        raise UserError(f"{file}: no prompts left ({len(numbered)} lines, skip={skip})")
    return prompts


def _parse(file: Path, number: int, line: str) -> Prompt:
    where = f"{file}, line {number}"
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where}: expected an object with a prompt, found {line[:40]!r}")
    present = [form for form in _FORMS if isinstance(fields.get(form[0]), str)]
    if not present:
        raise UserError(f"{where}: needs a text field 'question', 'prompt' or 'text'")
    answered = [form for form in present if isinstance(fields.get(form[1]), str)]
    asked, answer_field, prompt_form, answer_form = (answered or present)[0]
    answer = fields[answer_field] if answered else None
    return Prompt(
        message=fields[asked],
        text=prompt_form.format(fields[asked]),
        answer=answer,
        reference=None if answer is None else answer_form.format(answer),
        source=f"{file.name}:{number}",
    )


def tokenize(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool | None = None,
    seed: int = 0,
) -> list[Request]:
    """Return requests numbered from 0, with seeds from `seed` on.

    `chat` is whether prompts go through the tokenizer's chat template; None: where it has one.
    """
    template = uses_template(tokenizer, chat)
    return [
        _request(index, prompt, tokenizer, template, seed + index)
        for index, prompt in enumerate(prompts)
    ]


def uses_template(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Return whether prompts go through the chat template; `chat` None: where there is one."""
    if chat and tokenizer.chat_template is None:
        raise UserError("chat=true, but the tokenizer has no chat template: use chat=null")
    return tokenizer.chat_template is not None if chat is None else chat


def _request(
    index: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template: bool, seed: int
) -> Request:
    if not template:
        ids = tokenizer(prompt.text)["input_ids"]
        continuation = prompt.reference
    else:
        turn = [{"role": "user", "content": prompt.message}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them
        continuation = prompt.answer
    if not ids:
        raise UserError(f"{prompt.source}: the prompt is empty")
    reference = None
    if continuation is not None:
        reference = np.array(tokenizer(continuation, add_special_tokens=False)["input_ids"])
    return Request(index, np.array(ids, dtype=np.int64), reference, seed)


def check_requests(model: PreTrainedModel, requests: Sequence[Request], decode: Decoding) -> None:
    """Raise UserError for prompts that are too long and for tokens that the model does not have."""
    facts = model.config.get_text_config().to_dict()
    vocabulary, positions = facts["vocab_size"], facts.get("max_position_embeddings")
    for request in requests:
        length = len(request.prompt)
        if positions is not None and length + decode.max_new_tokens > positions:
            raise UserError(
                f"prompt {request.index} has {length} tokens, with decode.max_new_tokens="
                f"{decode.max_new_tokens} more than the model's {positions} positions"
            )
        for name, ids in (("prompt", request.prompt), ("reference of prompt", request.reference)):
            if ids is not None and len(ids) and ids.max() >= vocabulary:
                raise UserError(
                    f"{name} {request.index} holds token {ids.max()}, the model has {vocabulary}: "
                    f"the tokenizer is another model's"
                )
    if isinstance(decode, BlockDiffusion) and decode.mask_id not in range(vocabulary):
        raise UserError(f"decode.mask_id is {decode.mask_id}; the model has {vocabulary} tokens")
