"""Recordings of the bundled model at other block lengths; the problems of the bundled traces."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oled.paths import model_path, traces_dir

if TYPE_CHECKING:
    from oled.record import Prompt

HOME = Path("outputs/recorded")
NEW_TOKENS = 96
TOKENS_PER_FORWARD = 2  # the small model is rarely above its threshold


def recorded(block_length: int) -> str:
    """Return the folder of a recording on the six bundled prompts; make it where it is missing."""
    weights = (model_path() / "model.safetensors").read_bytes()
    folder = HOME / f"tiny-b{block_length}-{hashlib.sha256(weights).hexdigest()[:8]}"
    if not (folder / "trace.json").is_file():
        from oled.record import BlockDiffusion, load_model, load_prompts, record

        decode = BlockDiffusion(
            block_length, max_new_tokens=NEW_TOKENS, tokens_per_forward=TOKENS_PER_FORWARD
        )
        record(
            load_model("tiny", "cpu"), load_prompts(traces_dir() / "prompts.jsonl"), decode, folder
        )
    return str(folder)


def problems(trace: str) -> list[Prompt]:
    """Return the problems of a bundled trace by its token ids; answers as far as written.

    So a study has problems in GSM8K's form, and no file of them is bundled.
    """
    from transformers import PreTrainedTokenizerFast

    from oled.record import Prompt
    from oled.trace.reader import load

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path())
    recording = load(traces_dir() / trace)
    forwards, tokens = recording.forwards, recording.tokens
    request = np.repeat(forwards.request, forwards.tokens)
    found = []
    for number in np.unique(request):
        mine = (request == number) & (tokens.token_id != tokenizer.mask_token_id)
        # the last token that stood at each position: a prefill's, or the one opened there
        latest = dict(
            zip(tokens.position[mine].tolist(), tokens.token_id[mine].tolist(), strict=True)
        )
        text = tokenizer.decode(
            [latest[position] for position in sorted(latest)], skip_special_tokens=True
        )
        asked, end, answer = text.partition("\nAnswer:")
        question = asked.removeprefix("Question: ")
        found.append(Prompt(question, asked + end, answer.strip(), answer, f"{trace}:{number}"))
    return found
