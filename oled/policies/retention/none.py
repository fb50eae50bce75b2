"""No retention: who is resident at the start stays; for compositions that admit nobody.

The scores stay as they are. Placement once and for all, such as llama.cpp's `--n-cpu-moe`, needs no
more, and so no order of forwards. Cost: none.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: NoRetention) -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class NoRetention(Retention):
    """Nothing is scored; goes with `admission: frozen`."""

    scores = False
    observe = observe
