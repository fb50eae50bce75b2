"""Decoding loops: settings that are also the loops' factories. They know nothing of recording."""

from __future__ import annotations

from oled.running.decode.autoregressive import Autoregressive
from oled.running.decode.batch import Announce, Pass, Request, Share
from oled.running.decode.block_diffusion import BlockDiffusion
from oled.running.decode.canvas_diffusion import CanvasDiffusion
from oled.running.decode.common import Mode
from oled.running.decode.speculation import Drafting
from oled.running.decode.speculative_autoregressive import SpeculativeAutoregressive
from oled.running.decode.speculative_blocks import SpeculativeBlocks
from oled.running.decode.watch import DecodingError

Speculative = SpeculativeAutoregressive | SpeculativeBlocks
Decoding = Autoregressive | BlockDiffusion | CanvasDiffusion | Speculative

__all__ = [
    "Announce",
    "Autoregressive",
    "BlockDiffusion",
    "CanvasDiffusion",
    "Decoding",
    "DecodingError",
    "Drafting",
    "Mode",
    "Pass",
    "Request",
    "Share",
    "Speculative",
    "SpeculativeAutoregressive",
    "SpeculativeBlocks",
]
