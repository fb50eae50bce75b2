"""Simulators whose link is wrong on purpose, in plain Python: run as a program, without JIT.

`python -m tests.validate.wrong_clock OUT.npz` runs every configuration under every variant. A
variant replaces lines of the clock's source; lines that are not there any more are an error.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from oled.hardware import CostTables, build_costs, load_profile, load_runtime
from oled.live.routing import cut
from oled.models.catalogue import model_geometry
from oled.policies.composition import load_composition
from oled.policies.prefetch.none import NoPrefetch
from oled.sim import clock, lanes, replay
from oled.sim.calibration import Calibration
from oled.sim.prepare import Replay, replay_steps
from oled.sim.prepared import PreparedTrace
from oled.sim.settings import Settings
from oled.sim.slots import parse_slots
from oled.trace.steps import Steps
from oled.validate.pace import Pace

CONFIGURATIONS = [("hybrimoe", 20), ("prefetch_dial", 50), ("oled_exact_fill", 50)]
FORWARDS = 6


def steps() -> Steps:
    return cut(PreparedTrace.of("demo").steps, 0, FORWARDS)


def costs(steps: Steps) -> CostTables:
    """A machine whose CPU and link slow each other down, and that decides in next to no time."""
    found = build_costs(
        PreparedTrace.of("demo").geometry,
        steps.tokens,
        steps.context,
        int(steps.tokens.max()),
        load_profile("rtx4090_desktop"),
        load_runtime("emulated"),
        model_geometry("llada2_mini"),
    )
    return dataclasses.replace(Pace(2.0).of(found), policy_ns=20_000)


@functools.cache
def learned() -> Calibration:
    return Calibration.from_steps(PreparedTrace.of("calibration").steps)


def simulated(steps: Steps, costs: CostTables, policy: str, slots: int, **parts: Any) -> Replay:
    settings = Settings(slots=slots, plans=True, timeline=(0, steps.num_forwards))
    budget = parse_slots(slots, "layer", steps.num_experts, costs.expert_bytes)
    composition = dataclasses.replace(load_composition(policy), **parts)
    return replay_steps(steps, costs, composition, budget, settings, learned())


@contextmanager
def changed(module: ModuleType, name: str, *lines: tuple[str, str]) -> Iterator[None]:
    """The function `name` with some of its source replaced, wherever it was imported."""
    before: Callable[..., Any] = getattr(module, name)
    source = inspect.getsource(before)
    for old, new in lines:
        if source.count(old) != 1:
            raise RuntimeError(f"{name}: not there once: {old}")
        source = source.replace(old, new)
    exec(compile(source, module.__file__ or name, "exec"), module.__dict__)
    after = getattr(module, name)
    users = [m for m in (clock, lanes, replay) if getattr(m, name, None) in (before, after)]
    for user in users:
        setattr(user, name, after)
    try:
        yield
    finally:
        for user in users:
            setattr(user, name, before)


_BEHIND = """\
            began = -1
            if copied < transfers:
                room = min(rules.staging - 1 - cache.staged_experts, free_slots - 1)
                began = take_prefetch(lanes, queue, cache, costs, step.index, room)
                free_slots -= max(0, began)
            if began >= 0:
                pass
            elif copied < transfers:
                if free_slots > 0:"""
_STOPPED = """\
    transfers = plan.transfers
    if transfers > 0 and lanes.link_what == 2:
        lanes.copying.left_ns += lanes.link_left // PPM
        for name, value in lanes.copying._asdict().items():
            setattr(lanes.paused, name, value)
        lanes.link_what, lanes.link_ended = IDLE, lanes.now
"""
_LATE = "if plan.state[i] == IN_FLIGHT and cache.staged[layer, step.expert[i]] == COPYING:"
_LANDS = "if mine and plan.state[i] == IN_FLIGHT and plan.place[i] == ON_GPU:"

CHANGES: dict[str, tuple[ModuleType, str, tuple[tuple[str, str], ...]]] = {
    "demand waits behind all that was asked for ahead": (
        clock,
        "run_layer",
        (("            if copied < transfers:\n                if free_slots > 0:", _BEHIND),),
    ),
    "demand stops a copy on its way": (
        clock,
        "run_layer",
        (("    transfers = plan.transfers\n", _STOPPED),),
    ),
    "a late copy counts as landed": (
        clock,
        "run_layer",
        ((_LATE, "if False:"), (_LANDS, "if False:")),
    ),
    "copies ahead take no time": (
        lanes,
        "_begin_chunk",
        (("AHEAD, piece, costs.copy_wake_ns", "AHEAD, 0, 0"),),
    ),
    "nothing is copied ahead while experts compute": (
        clock,
        "run_layer",
        (("queue, cache, costs, step.index, room))", "queue, cache, costs, step.index, 0))"),),
    ),
}  # fmt: skip
NOTHING = "nothing is copied ahead"


def main(out: str) -> None:
    known = steps()
    machine = costs(known)
    found: dict[str, Any] = {}

    def keep(variant: str, **parts: Any) -> None:
        for policy, slots in CONFIGURATIONS:
            done = simulated(known, machine, policy, slots, **parts)
            tally, log = done.tally, done.lanes.log[: done.lanes.entries]
            values = (tally.end_ns - tally.begin_ns, tally.plans, tally.orders, log)
            for name, value in zip(("ns", "plans", "orders", "log"), values, strict=True):
                found[f"{variant}|{policy}|{slots}|{name}"] = value

    keep("right")
    keep(NOTHING, prefetch=NoPrefetch())
    for variant, (module, name, lines) in CHANGES.items():
        with changed(module, name, *lines):
            keep(variant)
    np.savez(out, **found)


if __name__ == "__main__":
    main(sys.argv[1])
