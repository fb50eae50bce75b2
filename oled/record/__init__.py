"""Record a running model as a trace: `record` joins hooks and decoding loops.

loaded = load_model("tiny")
report = record(loaded, load_prompts("prompts.jsonl"), BlockDiffusion(block_length=16), "out")
"""

from __future__ import annotations

from oled.record.run import RecordReport, record
from oled.running.decode import (
    Autoregressive,
    BlockDiffusion,
    CanvasDiffusion,
    Decoding,
    Drafting,
    Mode,
    SpeculativeAutoregressive,
    SpeculativeBlocks,
)
from oled.running.loading import LoadedModel, load_model
from oled.running.prompts import Prompt, load_prompts, plain_prompt
from oled.running.recorder import Recorder

__all__ = [
    "Autoregressive",
    "BlockDiffusion",
    "CanvasDiffusion",
    "Decoding",
    "Drafting",
    "LoadedModel",
    "Mode",
    "Prompt",
    "RecordReport",
    "Recorder",
    "SpeculativeAutoregressive",
    "SpeculativeBlocks",
    "load_model",
    "load_prompts",
    "plain_prompt",
    "record",
]
