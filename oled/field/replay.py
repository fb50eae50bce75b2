"""Run a scenario on the simulator's own clock: `run_dense`, `run_layer`, `run_head`.

Nothing is decided here: which experts hit, are copied or computed on the CPU is given by the
events. Copies in the background and ahead go through the clock's queue of prefetches, so they yield
to copies on demand, run under GPU time, and slow the CPU down like any other copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit, jitable
from oled.field.scenario import Counts, Scenario
from oled.policies.interface import (
    ABSENT,
    COPYING,
    HOLD,
    IN_FLIGHT,
    NOT_STAGED,
    ON_CPU,
    ON_GPU,
    RESIDENT,
    STAGED,
    TRANSFER,
    Cache,
    Costs,
    Plan,
    Queue,
    Rules,
    Step,
)
from oled.sim.clock import run_dense, run_head, run_layer
from oled.sim.lanes import PPM, Lanes, new_lanes

FAR = 2**40  # a layer-step that never comes: a copy that nothing waits for is never dropped
AHEAD, BACKGROUND, IDS = 64, 128, 512  # first ids of copies ahead, in the background; all ids
BACKLOG = 1  # copies a layer that may wait in the background
PIECES = 8  # a copy in the background lets others pass between its pieces
SLOTS = 2**30  # free slots are never short: how many copies there were is given


@jitable
def _ask(queue: Queue, layer: int, expert: int, due: int, first: bool, pieces: int) -> None:
    """Queue a copy; `first`: before all others."""
    if first and queue.begin > 0:
        queue.begin -= 1
        at = queue.begin
    else:
        at = queue.end
        queue.end += 1
    queue.layer[at], queue.expert[at], queue.due[at] = layer, expert, due
    queue.kind[at], queue.chunks[at] = HOLD, pieces


@jitable
def _settle(layer: int, cache: Cache) -> None:
    """Forget what has landed for this layer: it was used, or it stays without being asked for."""
    for expert in range(AHEAD, IDS):
        if cache.staged[layer, expert] == STAGED:
            cache.staged[layer, expert] = NOT_STAGED
            cache.staged_experts -= 1


@jitable
def _recall(step: Step, hits: int, copied: int, cache: Cache, plan: Plan) -> None:
    """Write the plan of a step whose active set is: hits, copied, on the CPU, copied ahead."""
    transfers, on_cpu = 0, 0
    for i in range(step.expert.size):
        plan.index[step.expert[i]] = i
        plan.stays[i] = 1
        plan.state[i], plan.place[i] = RESIDENT, ON_GPU
        if step.expert[i] >= AHEAD:
            at = cache.staged[step.layer, step.expert[i]]
            if at == COPYING:
                plan.state[i] = IN_FLIGHT
            elif at == NOT_STAGED:  # not begun: it is copied on demand
                plan.state[i], plan.place[i] = ABSENT, TRANSFER
        elif i >= hits:
            plan.state[i] = ABSENT
            plan.place[i] = TRANSFER if i < hits + copied else ON_CPU
        if plan.place[i] == TRANSFER:
            plan.order[transfers] = i
            transfers += 1
        on_cpu += int(plan.place[i] == ON_CPU)
    plan.transfers, plan.on_cpu, plan.evicted_active = transfers, on_cpu, 0


def clock(
    events: Counts,
    waited: Counts,
    backlog: int,
    dense_ns: int,
    head_ns: int,
    cache: Cache,
    costs: Costs,
    plan: Plan,
    queue: Queue,
    lanes: Lanes,
    rules: Rules,
    expert: NDArray[np.uint16],
    count: NDArray[np.int32],
    step: Step,
) -> None:
    """Let all tokens pass. `events`: hits, copied, CPU, background, ahead; [5, tokens, layers].

    `waited` [tokens, layers]: of the copies ahead for a layer-step, how many it needs. No more than
    `backlog` copies a layer wait in the background: those before them are waited for.
    """
    tokens, layers, asked = events.shape[1], events.shape[2], 0
    for token in range(tokens):
        for layer in range(layers):
            index, here = token * layers + layer, events[:, token, layer]
            overdue = max(0, queue.end - queue.begin - layers * backlog)
            queue.begin += overdue
            copied = here[1] + overdue
            own = here[0] + copied + here[2]
            for i in range(own):
                expert[i] = i
            for i in range(waited[token, layer]):
                expert[own + i] = AHEAD + i
            n = own + waited[token, layer]
            step.index, step.forward, step.layer, step.clock = index, token, layer, index
            step.expert, step.count = expert[:n], count[:n]
            run_dense(lanes, dense_ns, step, cache, costs, queue, rules)
            _recall(step, here[0], copied, cache, plan)
            run_layer(lanes, step, plan, cache, costs, queue, rules, SLOTS)
            for i in range(n):
                plan.index[step.expert[i]] = -1
            _settle(layer, cache)
            for i in range(here[4]):
                if cache.staged[(layer + 1) % layers, AHEAD + i] == NOT_STAGED:
                    _ask(queue, (layer + 1) % layers, AHEAD + i, index + 1, True, 1)
            for _ in range(here[3]):
                _ask(queue, layer, BACKGROUND + asked % (IDS - BACKGROUND), FAR, False, PIECES)
                asked += 1
        run_head(lanes, head_ns, token, index, cache, costs, queue, rules)


@functools.cache
def _compiled(signature: tuple[Any, ...]) -> Callable[..., None]:
    compiled: Callable[..., None] = bare_njit(types.void(*signature))(clock)
    return compiled


def token_ns(scenario: Scenario) -> float:
    """Return the mean time of a token, ns."""
    tokens = scenario.events.cpu.shape[0]
    data = _state(scenario)
    _compiled(tuple(numba.typeof(argument) for argument in data))(*data)
    lanes: Lanes = data[9]
    return lanes.now / int(tokens)


def _state(scenario: Scenario) -> tuple[Any, ...]:
    ev = scenario.events
    events = np.stack([ev.hits, ev.copied, ev.cpu, ev.background, ev.ahead]).astype(np.int64)
    asked = np.roll(ev.ahead.ravel(), 1).reshape(
        ev.ahead.shape
    )  # for this layer, by the one before
    waited = np.minimum(asked, np.rint(scenario.ahead_used * asked).astype(np.int64))
    layers, most = scenario.layers, int((ev.hits + ev.copied + ev.cpu + waited).max()) + 32
    copies = int(ev.background.sum() + ev.ahead.sum()) + 1
    i8 = np.int64
    shape = (layers, IDS)
    experts = np.full(layers, IDS, i8)
    size = np.full(layers, round(scenario.expert_bytes), i8)
    cache = Cache(
        resident=np.zeros(shape, np.uint8), score=np.zeros(shape), stamp=np.zeros(shape, i8),
        staged=np.zeros(shape, np.uint8), fresh=np.zeros(shape, np.uint8), capacity=experts,
        used=np.zeros(layers, i8), resident_bytes=0, budget_bytes=0, staged_experts=0,
        num_experts=experts, expert_bytes=size, prior=np.zeros(shape), key=np.zeros(1),
        age=np.zeros(1, i8), item=np.zeros(1, i8),
    )  # fmt: skip
    plan = Plan(
        state=np.zeros(IDS, np.uint8), place=np.zeros(IDS, np.uint8), rank=np.zeros(IDS),
        stays=np.zeros(IDS, np.uint8), order=np.zeros(IDS, i8), evicted=np.zeros(1, i8),
        index=np.full(IDS, -1, i8), transfers=0, evictions=0, evicted_active=0, on_cpu=0, late=0,
    )  # fmt: skip
    layer, expert, kind, due, chunks = np.zeros((5, copies), i8)
    queue = Queue(layer, expert, kind, due, chunks, begin=0, end=0)
    rules = Rules(0, False, False, False, SLOTS, 0)
    active, count = np.zeros(most, np.uint16), np.ones(most, np.int32)
    step = Step(
        index=0, forward=0, layer=0, phase=0, block=0, denoising_step=0, tokens=1, clock=0,
        expert=active, count=count, mass=np.zeros((1, 4), np.float32),
        last_token=np.zeros(1, np.int32), next_use=np.zeros(1, i8),
        scores=np.zeros(0, np.float32), coming=np.zeros(0, np.float32),
    )  # fmt: skip
    head, dense = round(scenario.head_ns), round(scenario.dense_ns)
    costs = _costs(scenario, layers, most)
    return (
        np.ascontiguousarray(events), waited, BACKLOG, dense, head, cache, costs, plan, queue,
        new_lanes(1, layers, IDS), rules, active, count, step,
    )  # fmt: skip


def _costs(scenario: Scenario, layers: int, most: int) -> Costs:
    i8 = np.int64
    cpu, link = scenario.memory.shares()
    group = np.rint(scenario.gpu_expert_ns * np.arange(most + 1)).astype(i8)
    return Costs(
        layer_class=np.zeros(layers, i8),
        gpu_ns=np.ascontiguousarray(np.broadcast_to(group, (1, most + 1, most + 1))),
        cpu_ns=np.array([[0, round(scenario.cpu_expert_ns)]], i8),
        copy_ns=np.array([round(scenario.copy_ns)], i8),
        copy_out_ns=np.zeros(1, i8),
        act_out_ns=np.zeros(2, i8),
        act_back_ns=np.zeros(2, i8),
        copy_wake_ns=0,
        cpu_call_ns=round(scenario.cpu_call_ns),
        policy_ns=0,
        cpu_contention_ppm=round(cpu * PPM),
        link_contention_ppm=round(link * PPM),
        top_k=1,
    )
