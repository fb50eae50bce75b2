"""Recordings of the bundled model at other block lengths than the bundled traces have."""

from __future__ import annotations

import hashlib
from pathlib import Path

from oled.models.bundled import tiny_path
from oled.paths import traces_dir

HOME = Path("outputs/recorded")
NEW_TOKENS = 96
TOKENS_PER_FORWARD = 2  # the small model is rarely above its threshold


def recorded(block_length: int) -> str:
    """The folder of a recording on the six bundled prompts; made where it is not there yet."""
    weights = (tiny_path() / "model.safetensors").read_bytes()
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
