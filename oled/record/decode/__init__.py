"""Decoding loops: settings that are also the loops' factories. They know nothing of recording."""

from __future__ import annotations

from oled.record.decode.autoregressive import Autoregressive
from oled.record.decode.batch import Announce, Pass, Request, Share
from oled.record.decode.block_diffusion import BlockDiffusion
from oled.record.decode.canvas_diffusion import CanvasDiffusion
from oled.record.decode.common import Mode
from oled.record.decode.speculation import Drafting
from oled.record.decode.speculative_autoregressive import SpeculativeAutoregressive
from oled.record.decode.speculative_blocks import SpeculativeBlocks

Speculative = SpeculativeAutoregressive | SpeculativeBlocks
Decoding = Autoregressive | BlockDiffusion | CanvasDiffusion | Speculative

__all__ = [
    "Announce",
    "Autoregressive",
    "BlockDiffusion",
    "CanvasDiffusion",
    "Decoding",
    "Drafting",
    "Mode",
    "Pass",
    "Request",
    "Share",
    "Speculative",
    "SpeculativeAutoregressive",
    "SpeculativeBlocks",
]
