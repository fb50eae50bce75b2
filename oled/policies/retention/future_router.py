"""Future router: native router probability plus that predicted for the next forward.

Source: arXiv 2609.04895 and wuzhenhe/Spatio-Temporal-router (a replay). Read in code: the priority
of an expert at (layer, token) is its native probability plus that of an auxiliary head which
predicts the same layer at the next token; after each access missing experts are inserted and the
residents of lowest priority that were not just selected leave (`admission: demand`). *Ours*: a
forward of many tokens counts with its means; in block diffusion the head predicts the same position
in the next forward; the router's own scores (of a sigmoid router, too) are the probabilities; the
published cold start, which tops the first set up by priority, is left out, since those copies would
be free. Cost: O(E) a step, beside the head.
"""

from __future__ import annotations

import dataclasses

from oled.policies.interface import OBSERVE, Cache, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Retention


@kernel(OBSERVE)
def observe(step: Step, cache: Cache, memory: NoMemory, params: FutureRouter) -> None:
    for expert in range(cache.num_experts[step.layer]):
        cache.score[step.layer, expert] = step.scores[expert] + step.coming[expert]


@dataclasses.dataclass(frozen=True, slots=True)
class FutureRouter(Retention):
    """Mean router score of this forward and, as predicted, of the next one."""

    needs = frozenset({"order", "scores", "coming"})
    observe = observe
