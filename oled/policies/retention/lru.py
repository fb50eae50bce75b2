"""LRU: the expert whose last use is furthest back leaves first.

The score is the clock of the last use; inside a step the engine's stamps order the experts by their
last mention. Initial residents that were never used leave before all others, the least popular ones
first where they came from a calibration. Cost: O(A) a step. Used atomically (`admission: demand` or
`compete`) and, in the composition `naive_lru`, one expert at a time (`admission: sequential`).
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: Lru) -> None:
    for i in range(step.expert.size):
        cache.score[step.layer, step.expert[i]] = step.clock


@dataclasses.dataclass(frozen=True, slots=True)
class Lru(Retention):
    """Least recently used."""

    needs = frozenset({"order"})
    observe = observe
