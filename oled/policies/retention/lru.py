"""LRU: the expert whose last use is furthest back leaves first.

Recency is the stamp that the engine keeps anyway and that breaks every tie, so the score is constant.
Cost: O(1) a step. Used atomically (`admission: demand` or `compete`) and, in the composition
`naive_lru`, one expert at a time (`admission: sequential`).
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory, params) -> None:  # type: ignore[no-untyped-def]
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Lru(Retention):
    """Least recently used."""

    needs = frozenset({"order"})
    observe = observe
