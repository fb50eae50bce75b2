"""Which forwards a timeline shows when nobody says."""

from __future__ import annotations

import numpy as np

from oled.trace.steps import Steps

FORWARDS_WITHOUT_BLOCKS = 8


def first_block(steps: Steps) -> tuple[int, int]:
    """(first forward, number of forwards) of the first block, or the first few after a prefill."""
    blocks = steps.block[steps.block >= 0]
    if blocks.size == 0:
        return 1 if len(steps.block) > FORWARDS_WITHOUT_BLOCKS else 0, FORWARDS_WITHOUT_BLOCKS
    first = int(np.argmax(steps.block >= 0))
    same = (steps.block == steps.block[first]) & (steps.request == steps.request[first])
    return first, int(same.sum())
