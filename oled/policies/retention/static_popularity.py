"""Static popularity: the expert that was least popular on a calibration trace leaves first.

The score is the prior, set by the engine at each reset: the share of the layer's tokens that the
expert took on the calibration trace (another trace than the one judged). Nothing is learned on the
way. Fiddler (arXiv 2402.07033) and KTransformers place experts so, once and for all. Cost: none.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: StaticPopularity) -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class StaticPopularity(Retention):
    """Popularity on a calibration trace."""

    needs = frozenset({"calibration"})
    observe = observe
