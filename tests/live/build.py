"""Small live runs: the demo's routing cut short, and what they are compared with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from oled.hardware import CostTables, build_costs, load_profile, load_runtime
from oled.live.backends.kinds import EMULATED, Kind
from oled.live.replay import LiveReplay, live_replay
from oled.live.routing import Routing, form_of
from oled.live.store import HostStore
from oled.paths import trace_path
from oled.policies.composition import Composition, load_composition
from oled.sim.prepare import replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import parse_slots
from oled.trace import build_steps, load

RESIDENT = {
    "name": "all_resident",
    "description": "every expert has its slot",
    "retention": {"_target_": "oled.policies.retention.lru.Lru"},
    "admission": "frozen",
    "initial": "first",
}


def demo(
    first: int = 0, forwards: int = 12, rows: int = 1
) -> tuple[Routing, HostStore, CostTables]:
    trace = load(trace_path("demo"))
    routing = Routing.of(trace, build_steps(trace), first, forwards, rows)
    steps = routing.steps
    costs = build_costs(
        trace.geometry,
        steps.tokens,
        steps.context,
        int(steps.tokens.max()),
        load_profile("rtx5090_xeon8470q"),
        load_runtime("graph_fused"),
    )
    return routing, HostStore.random(form_of(trace.geometry), steps.num_experts), costs


def run(
    ready: tuple[Routing, HostStore, CostTables],
    policy: str | dict[str, Any] | Composition,
    slots: int | float,
    *,
    paced: bool = False,
    kind: Kind = EMULATED,
    **fields: Any,
) -> LiveReplay:
    routing, store, costs = ready
    settings = Settings(slots=slots, **fields)
    budget = parse_slots(
        slots, settings.scope, routing.steps.num_experts, routing.steps.expert_bytes
    )
    return live_replay(
        routing, store, costs, load_composition(policy), budget, settings, paced=paced, kind=kind
    )


def same_decisions(
    live: LiveReplay,
    ready: tuple[Routing, HostStore, CostTables],
    policy: str,
    slots: int | float,
    **fields: Any,
) -> bool:
    routing, _, costs = ready
    settings = Settings(slots=slots, plans=True, **fields)
    budget = parse_slots(
        slots, settings.scope, routing.steps.num_experts, routing.steps.expert_bytes
    )
    tally = replay_steps(routing.steps, costs, load_composition(policy), budget, settings).tally
    return np.array_equal(tally.plans, live.plans.plans) and np.array_equal(
        tally.orders, live.plans.orders
    )


def contention_free(costs: CostTables) -> CostTables:
    return dataclasses.replace(costs, contention_ppm=1_000_000)
