"""A trace made ready for replay."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from oled.hardware import CostTables
from oled.paths import trace_path
from oled.policies.composition import Composition
from oled.sim.again import Decisions
from oled.sim.calibration import Calibration
from oled.sim.prepare import Replay, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.trace import Trace, batch, build_steps, load
from oled.trace.schema import ConfidenceKind, Geometry
from oled.trace.steps import Steps


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A trace made ready for replay; build it once and pass it to many calls of `simulate`."""

    name: str
    hash: str
    geometry: Geometry
    steps: Steps
    lacks: frozenset[str]  # keys of NEEDS that the trace cannot serve
    memo: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    """Oracles computed already, by configuration: they do not depend on the policy."""
    decisions: Decisions | None = None
    """Those made on these steps; kept where `remembering` was asked for."""
    batches: dict[int, Subject] = dataclasses.field(default_factory=dict)
    """The same trace with so many requests in lockstep, once it was asked for."""

    @classmethod
    def of(cls, trace: Subject | Trace | str | Path) -> Subject:
        """From a loaded trace, the folder of one, or the name of a bundled one."""
        if isinstance(trace, Subject):
            return trace
        if not isinstance(trace, Trace):
            trace = load(trace_path(trace))
        steps = build_steps(trace)
        name = trace.path.name if trace.path is not None else "memory"
        return cls(name, trace.hash, trace.geometry, steps, _lacks(trace, steps))

    def remembering(self) -> Subject:
        """The same trace, deciding once what is replayed on several machines; for sweeps."""
        return dataclasses.replace(self, memo={}, batches={}, decisions=Decisions())

    def batched(self, rows: int) -> Subject:
        if rows == 1:
            return self
        if rows not in self.batches:
            steps = batch(self.steps, rows)
            decisions = None if self.decisions is None else Decisions()
            self.batches[rows] = dataclasses.replace(
                self, steps=steps, memo={}, batches={}, decisions=decisions
            )
        return self.batches[rows]

    def replay(
        self,
        costs: CostTables,
        composition: Composition,
        budget: Budget,
        settings: Settings,
        calibration: Calibration | None = None,
    ) -> Replay:
        """One configuration; see `replay_steps`."""
        run = replay_steps if self.decisions is None else self.decisions.replay
        return run(self.steps, costs, composition, budget, settings, calibration)


def _lacks(trace: Trace, steps: Steps) -> frozenset[str]:
    lacks = set(trace.manifest.lacks)
    if not trace.manifest.has_weights:
        lacks.add("weights")
    if trace.manifest.confidence_kind is ConfidenceKind.NONE:
        lacks.add("confidence")
    if not trace.manifest.ordered:
        lacks.add("order")
    if steps.scores is None:
        lacks.add("scores")
    if steps.pred_offsets is None:
        lacks.add("predictions")
    if (steps.block < 0).all():
        lacks.add("blocks")
    return frozenset(lacks)
