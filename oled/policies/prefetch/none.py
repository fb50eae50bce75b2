"""No prefetch."""

from __future__ import annotations

import dataclasses

from oled.policies.part import Prefetch


@dataclasses.dataclass(frozen=True, slots=True)
class NoPrefetch(Prefetch):
    """Nothing is copied ahead."""
