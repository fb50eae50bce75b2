"""For tests of all policies: the same trace with what a policy asks for.

Those of halves get it in halves, those that follow a trained predictor with its predictions, those
of drafts with forwards that draft and verify.
"""

from __future__ import annotations

import functools

from policies.foresight import drafted, foreseen

from oled.altered.split import PathPlan, split_trace
from oled.policies.composition import Composition, load_composition
from oled.sim.prepared import PreparedTrace


def fitting(subject: PreparedTrace, policy: str | Composition) -> PreparedTrace:
    """The subject, or what is made of it; paths and predictions are made up."""
    composition = load_composition(policy)
    if "drafts" in composition.needs:
        return _drafted(subject)
    if composition.predictor is not None:
        return _foreseen(subject)
    if "halves" not in composition.needs:
        return subject
    geometry = subject.geometry
    plan = PathPlan.at_random(geometry.experts_per_layer, 0.5, geometry.top_k)
    return PreparedTrace.of(split_trace(subject.read(), plan))


@functools.cache
def _foreseen(subject: PreparedTrace) -> PreparedTrace:
    made = PreparedTrace.of(foreseen(subject.read()))
    return made if subject.decisions is None else made.remembering()


@functools.cache
def _drafted(subject: PreparedTrace) -> PreparedTrace:
    made = PreparedTrace.of(drafted(subject.read()))
    return made if subject.decisions is None else made.remembering()
