"""Uniform: every layer has the same number of slots, for ever."""

from __future__ import annotations

import dataclasses

from oled.policies.part import Allocation


@dataclasses.dataclass(frozen=True, slots=True)
class Uniform(Allocation):
    """The same slots for every layer."""
