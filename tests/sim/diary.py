"""Parts that pass everything on and write down what they see: how the tests look inside a replay.

They are plain Python, so the driver runs in Python: equal results prove the two drivers equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from oled.policies.composition import Composition
from oled.policies.kernel import Memory
from oled.policies.part import Part, Prefetch, Retention
from oled.policies.struct import Struct
from oled.trace.steps import Steps


@dataclasses.dataclass(frozen=True)
class Seen:
    """Step, cache and plan as they were when a part was called; everything is a copy."""

    index: int
    layer: int
    expert: list[int]
    resident: np.ndarray
    used: np.ndarray
    capacity: np.ndarray
    resident_bytes: int
    budget_bytes: int
    staged_experts: int
    staged: np.ndarray
    score: np.ndarray
    stamp: np.ndarray
    place: list[int] = dataclasses.field(default_factory=list)
    state: list[int] = dataclasses.field(default_factory=list)
    stays: list[int] = dataclasses.field(default_factory=list)
    order: list[int] = dataclasses.field(default_factory=list)  # ids
    evicted_active: int = 0
    evicted: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (layer, id)

    @classmethod
    def of(cls, step: Any, cache: Any, plan: Any = None) -> Seen:
        seen = cls(
            int(step.index),
            int(step.layer),
            step.expert.tolist(),
            cache.resident.copy(),
            cache.used.copy(),
            cache.capacity.copy(),
            cache.resident_bytes,
            cache.budget_bytes,
            cache.staged_experts,
            cache.staged.copy(),
            cache.score.copy(),
            cache.stamp.copy(),
        )
        if plan is None:
            return seen
        active, experts = step.expert.size, cache.resident.shape[1]
        return dataclasses.replace(
            seen,
            place=plan.place[:active].tolist(),
            state=plan.state[:active].tolist(),
            stays=plan.stays[:active].tolist(),
            order=step.expert[plan.order[: plan.transfers]].tolist(),
            evicted_active=plan.evicted_active,
            evicted=[divmod(int(x), experts) for x in plan.evicted[: plan.evictions]],
        )


@dataclasses.dataclass(frozen=True)
class _Passed(Part):
    part: Part
    diary: list[Seen]

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.part.needs

    @property
    def learned(self) -> bool:  # type: ignore[override]
        return self.part.learned

    def params(self) -> Struct:
        return self.part.params()

    def first_memory(self, steps: Steps) -> Memory:
        return self.part.first_memory(steps)


@dataclasses.dataclass(frozen=True)
class SeenRetention(_Passed, Retention):
    """Sees every layer-step before its decision, scores renewed."""

    def observe(self, step, cache, memory, params) -> None:
        self.part.observe(step, cache, memory, params)
        self.diary.append(Seen.of(step, cache))


@dataclasses.dataclass(frozen=True)
class SeenPrefetch(_Passed, Prefetch):
    """Sees every layer-step that the policy decided, after its decision."""

    def ask(self, step, cache, costs, plan, side, queue, memory, params) -> None:
        self.diary.append(Seen.of(step, cache, plan))
        self.part.ask(step, cache, costs, plan, side, queue, memory, params)


def watched(composition: Composition) -> tuple[Composition, list[Seen], list[Seen]]:
    """The composition with parts that keep two diaries: before and after each decision."""
    before: list[Seen] = []
    after: list[Seen] = []
    parts: dict[str, Any] = {"retention": SeenRetention(composition.retention, before)}
    if composition.overlap:  # a blocking runtime takes no prefetch
        parts["prefetch"] = SeenPrefetch(composition.prefetch, after)
    return dataclasses.replace(composition, **parts), before, after
