"""One configuration on both sides: run live, and simulated with its plan log and timeline."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from oled.hardware import CostTables
from oled.live.backends.kind import Kind
from oled.live.backends.kinds import EMULATED
from oled.live.link_replay import difference_given
from oled.live.replay import LiveReplay, live_replay
from oled.live.routing import Routing
from oled.live.store import HostStore
from oled.policies.composition import Composition, load_composition
from oled.policies.files import composition_names
from oled.policies.part import ask_nothing
from oled.sim.calibration import Calibration
from oled.sim.prepare import Assembly, Replay, assemble, replay_steps
from oled.sim.prepared import PreparedTrace
from oled.sim.settings import Settings
from oled.sim.slots import parse_slots

Ready = tuple[Routing, HostStore, CostTables]


@dataclasses.dataclass(frozen=True)
class Configured:
    """`ready` under a policy; learned from the bundled calibration trace."""

    ready: Ready
    composition: Composition
    settings: Settings

    @property
    def known(self) -> tuple[Any, ...]:
        routing, _, costs = self.ready
        budget = parse_slots(
            self.settings.slots,
            self.settings.scope,
            routing.steps.num_experts,
            routing.steps.expert_bytes,
        )
        return costs, self.composition, budget, self.settings, calibration()

    def assembled(self) -> Assembly:
        return assemble(self.ready[0].steps, *self.known)

    def live(self, *, paced: bool = False, kind: Kind[Any] = EMULATED) -> LiveReplay:
        return live_replay(*self.ready[:2], *self.known, paced=paced, kind=kind)

    def simulated(self) -> Replay:
        return replay_steps(self.ready[0].steps, *self.known)

    def difference(self, live: LiveReplay) -> str | None:
        steps = self.ready[0].steps
        return difference_given(live.plans, live.link, steps, self.assembled())


def configured(
    ready: Ready,
    policy: str | dict[str, Any] | Composition,
    slots: int | float,
    **fields: Any,
) -> Configured:
    timeline = (0, ready[0].steps.num_forwards)
    settings = Settings(slots=slots, plans=True, timeline=timeline, **fields)
    return Configured(ready, load_composition(policy), settings)


@functools.cache
def calibration() -> Calibration:
    return Calibration.from_steps(PreparedTrace.of("calibration").steps)


@functools.cache
def policies() -> list[str]:
    """Every shipped policy of one GPU that runs live: it keeps the model's routes, and follows no
    trained predictor, whose words the demo's routing lacks (see test_predictors_live)."""
    found = {name: load_composition(name) for name in composition_names()}
    return [n for n, one in found.items() if one.reroute is None and one.predictor is None]


@functools.cache
def prefetching() -> list[str]:
    """Those of them that copy ahead."""
    return [n for n in policies() if type(load_composition(n).prefetch).ask is not ask_nothing]
