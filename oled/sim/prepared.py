"""A trace made ready for replay."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from oled.altered.reroute import Reroute, RouteChange, reroute_trace
from oled.altered.reroute.trace import recorded_rule
from oled.altered.split.trace import split_plan
from oled.errors import UserError
from oled.hardware import CostTables
from oled.paths import trace_path
from oled.policies.composition import Composition
from oled.sim.calibration import Calibration
from oled.sim.clock_replay import Decisions
from oled.sim.prepare import Replay, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.trace import Trace, batch, build_steps, load
from oled.trace.drafts import Verifications, undrafted
from oled.trace.schema import ConfidenceKind, Geometry, Phase
from oled.trace.stages import STAGES
from oled.trace.steps import Steps, with_predictions


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PreparedTrace:
    """A trace made ready for replay; build it once and pass it to many calls of `simulate`."""

    name: str
    hash: str
    geometry: Geometry
    steps: Steps
    lacks: frozenset[str]  # keys of NEEDS that the trace cannot serve
    read: Callable[[], Trace]  # gives the trace again
    labels: tuple[str, ...] = ()  # what must stand beside a result
    change: RouteChange | None = None  # what a rule has done to the routes
    drafts: Verifications | None = None  # where tokens were drafted and verified
    known_before: bool = True  # a forward's confidences are those of the one before
    memo: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    """Oracles computed already, by configuration: they do not depend on the policy."""
    decisions: Decisions | None = None
    """Those made on these steps; kept where `remembering` was asked for."""
    batches: dict[int, PreparedTrace] = dataclasses.field(default_factory=dict)
    """The same trace with so many requests in lockstep, once it was asked for."""
    rules: dict[Reroute, PreparedTrace] = dataclasses.field(default_factory=dict)
    """The same trace with its routes changed, once it was asked for."""
    predictors: dict[str, PreparedTrace] = dataclasses.field(default_factory=dict)
    """The same trace with the predictions of another predictor, once it was asked for."""
    plain: dict[str, PreparedTrace] = dataclasses.field(default_factory=dict)
    """By hash what plain decoding would have recorded, once it was asked for."""
    own: list[PreparedTrace] = dataclasses.field(default_factory=list)
    """The same trace with each forward's own confidences, once it was asked for."""

    @classmethod
    def of(
        cls, trace: PreparedTrace | Trace | str | Path, *, allow_partial: bool = False
    ) -> PreparedTrace:
        """From a loaded trace, the folder of one, or the name of a bundled one."""
        if isinstance(trace, PreparedTrace):
            return trace
        read: Callable[[], Trace]
        if isinstance(trace, Trace):
            read = functools.partial(_itself, trace)
        else:  # read again where it is needed again, not kept
            read = functools.partial(load, trace_path(trace), allow_partial=allow_partial)
        return cls._made(read(), read)

    @classmethod
    def _made(cls, trace: Trace, read: Callable[[], Trace]) -> PreparedTrace:
        steps = build_steps(trace, previous_confidences=True)
        name = trace.path.name if trace.path is not None else "memory"
        rule = recorded_rule(trace)
        labels = [] if rule is None else [f"routes of a model that ran under {rule}"]
        if STAGES in trace.manifest.provenance:
            labels.append(f"stages of the text: {trace.manifest.provenance[STAGES]}")
        if (plan := split_plan(trace)) is not None:
            labels.append(f"paths of expert halves, {plan}")
        return cls(
            name,
            trace.hash,
            trace.geometry,
            steps,
            _lacks(trace, steps),
            read,
            tuple(labels),
            drafts=Verifications.of(trace),
        )

    def remembering(self) -> PreparedTrace:
        """The same trace, deciding once what is replayed on several machines; for sweeps."""
        return dataclasses.replace(
            self, memo={}, batches={}, rules={}, predictors={}, own=[], decisions=Decisions()
        )

    def knowing_its_own(self) -> PreparedTrace:
        """The same trace with the confidences that each forward ends with: what no policy can know
        while it runs."""
        if not self.own:
            steps = build_steps(self.read())
            self.own.append(
                dataclasses.replace(
                    self,
                    steps=steps,
                    known_before=False,
                    memo={},
                    batches={},
                    rules={},
                    predictors={},
                    plain={},
                    decisions=None if self.decisions is None else Decisions(),
                )
            )
        return self.own[0]

    def batched(self, rows: int) -> PreparedTrace:
        if rows == 1:
            return self
        if self.drafts is not None:
            raise UserError(
                f"workload.batch_size={rows}: trace '{self.name}' holds drafts, whose requests "
                f"do not run in lockstep"
            )
        if rows not in self.batches:
            steps = batch(self.steps, rows)
            decisions = None if self.decisions is None else Decisions()
            self.batches[rows] = dataclasses.replace(
                self, steps=steps, memo={}, batches={}, decisions=decisions
            )
        return self.batches[rows]

    def rerouted(self, rule: Reroute) -> PreparedTrace:
        """The same trace with its block forwards routed by a rule (open loop)."""
        if rule not in self.rules:
            trace, change = reroute_trace(self.read(), rule)
            self.rules[rule] = dataclasses.replace(
                self,
                steps=build_steps(trace, previous_confidences=self.known_before),
                labels=(*self.labels, change.label),
                change=change,
                memo={},
                batches={},
                rules={},
                predictors={},
                decisions=None if self.decisions is None else Decisions(),
            )
        return self.rules[rule]

    def predicting(self, predictor: str) -> PreparedTrace:
        """The same trace with what `predictor` said in it; TraceError if it was not recorded."""
        if predictor not in self.predictors:
            steps = with_predictions(self.read(), self.steps, predictor)
            lacks = self.lacks - {"predictions", "coming"}
            if steps.horizons < steps.num_layers:
                lacks |= {"coming"}
            self.predictors[predictor] = dataclasses.replace(
                self,
                steps=steps,
                lacks=lacks,
                batches={},
                rules={},
                predictors={},
                decisions=None if self.decisions is None else Decisions(),
            )
        return self.predictors[predictor]

    def undrafted(self) -> PreparedTrace:
        """What plain decoding with the same settings would have recorded."""
        if self.hash not in self.plain:
            trace = undrafted(self.read())
            plain = PreparedTrace._made(trace, functools.partial(_itself, trace))
            self.plain[self.hash] = plain if self.known_before else plain.knowing_its_own()
        return self.plain[self.hash]

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


def _itself(trace: Trace) -> Trace:
    return trace


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
    if steps.horizons < steps.num_layers:
        lacks.add("coming")
    if (steps.block < 0).all():
        lacks |= {"blocks", "stages"}
    if (steps.step < 0).all():
        lacks.add("blocks")
    if not (steps.phase == Phase.DRAFT).any():
        lacks.add("drafts")
    if trace.geometry.expert_parts != 2:
        lacks.add("halves")
    return frozenset(lacks)
