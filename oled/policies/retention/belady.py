"""Belady's MIN: the expert whose next use is furthest away leaves first.

With `admission: compete` this is MIN with bypass: a transferred expert may be used once and
discarded. Optimal in hits for experts of one size, without prefetch; it knows nothing of time, so
it is no bound on TPOT once work is shared with the CPU or copied ahead. The future is this request
(lifecycle `request`) or the whole trace (`persistent`). Cost: O(A) a step; `next_use` is one pass.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] = -step.next_use[i]


@dataclasses.dataclass(frozen=True, slots=True)
class Belady(Retention):
    """Furthest next use leaves first; needs the future."""

    needs = frozenset({"order", "future"})
    observe = observe
