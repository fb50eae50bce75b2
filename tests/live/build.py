"""Small live runs: the demo's routing cut short, and what they are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from oled.hardware import build_costs, load_profile, load_runtime
from oled.live.backends.kind import Kind
from oled.live.backends.kinds import EMULATED
from oled.live.replay import LiveReplay
from oled.live.routing import Routing, form_of
from oled.live.store import HostStore
from oled.paths import trace_path
from oled.policies.composition import Composition
from oled.trace import build_steps, load
from tests.live.configured import Ready, configured

RESIDENT = {
    "name": "all_resident",
    "description": "every expert has its slot",
    "retention": {"_target_": "oled.policies.retention.lru.Lru"},
    "admission": "frozen",
    "initial": "first",
}


def demo(first: int = 0, forwards: int = 12, rows: int = 1) -> Ready:
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
    ready: Ready,
    policy: str | dict[str, Any] | Composition,
    slots: int | float,
    *,
    paced: bool = False,
    kind: Kind[Any] = EMULATED,
    **fields: Any,
) -> LiveReplay:
    return configured(ready, policy, slots, **fields).live(paced=paced, kind=kind)


def same_decisions(
    live: LiveReplay, ready: Ready, policy: str, slots: int | float, **fields: Any
) -> bool:
    """As the simulator's own clock has them."""
    tally = configured(ready, policy, slots, **fields).simulated().tally
    return np.array_equal(tally.plans, live.plans.plans) and np.array_equal(
        tally.orders, live.plans.orders
    )
