"""All-transfer: every miss is copied to the GPU, in id order. What misses arrive as, untouched."""

from __future__ import annotations

import dataclasses

from oled.policies.part import Dispatch


@dataclasses.dataclass(frozen=True, slots=True)
class AllTransfer(Dispatch):
    """Every miss is copied."""

    reads_costs = False
