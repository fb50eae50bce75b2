"""The driver: one loop over forwards and layer-steps, compiled or in Python.

The order of events stands here once. What differs between drivers is chosen at compile time by an
argument that is None (numba leaves out a branch on `is not None` only where the argument is None):

- `replay`: parts decide, the lanes run;
- clock replay (`oled.sim.clock_replay`): no parts, decisions are read from a `log`;
- the live decider (`oled.live.decider`): calls `decide_step` and, when the policy's time is over,
  `ask_ahead`; real time passes in between;
- decisions alone (`oled.sim.decisions`): no lanes, and nothing is booked.

The same source runs compiled and in Python. Compiled, the parts of a policy arrive as function
pointers; with a part in plain Python, the loop itself runs in Python and everything around that
part stays compiled. Results are equal to the nanosecond and the byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit, jitable, shared_njit
from oled.policies.decide import decide, decides
from oled.policies.interface import ON_CPU, Plan, Side, Step
from oled.sim.clock import run_dense, run_head, run_layer, run_policy
from oled.sim.lanes import LOG_QUEUE, LOG_RESIDENTS, Lanes, note
from oled.sim.parts import PARTS, Parts
from oled.sim.requests import abandon, clear, fit_capacities, reset
from oled.sim.serial import run_layer_serially
from oled.sim.staging import clear_layer
from oled.sim.state import State, point_at
from oled.sim.tally import L_TIME, book_lanes, count_step, write_plan, write_slots


class Log(NamedTuple):
    """What was decided, as far as the clock needs it."""

    plans: NDArray[np.uint8]  # [N] as in `Tally`
    orders: NDArray[np.int16]  # [N] as in `Tally`
    slots: NDArray[np.int32]  # [S, 2] as in `Tally`


@jitable
def begin_forward(parts: Parts | None, lanes: Lanes | None, state: State, forward: int) -> None:
    """Begin a forward: a new request starts afresh, and the allocation hands out the slots."""
    work, options, rules, at = state.work, state.options, state.rules, state.at
    if lanes is not None:
        state.tally.begin_ns[forward] = lanes.now
        lanes.recording = options.log_from <= forward < options.log_to
    if parts is not None:
        first = forward == 0 or work.request[forward] != work.request[forward - 1]
        if first and (forward == 0 or not options.persistent):
            reset(state.cache, state.start)
            for cells in parts.cells:
                clear(cells)
        at.forward, at.phase, at.block = forward, work.phase[forward], work.block[forward]
        at.denoising_step, at.first_of_request = work.denoising_step[forward], first
        parts.allocate(at, state.cache, parts.memory.allocation, parts.params.allocation)
        if lanes is not None and not rules.pooled and not rules.overshoot:
            fit_capacities(state.cache, state.plan, lanes)


@jitable
def decide_step(
    parts: Parts, step: Step, lanes: Lanes, state: State, request: int, first: int
) -> int:
    """Decide a layer-step and book it.

    `first` is where its plan is written in the tally. Returns the slots that copies may take at
    once.
    """
    cache, costs, plan, rules = state.cache, state.costs, state.plan, state.rules
    slots: int = decide(parts, step, cache, costs, plan, rules)
    count_step(step, cache, plan, lanes, state.tally, request)
    write_plan(step, plan, state.tally, first)
    return slots


@jitable
def ask_ahead(parts: Parts, step: Step, side: Side, state: State) -> None:
    """Ask for prefetches once the policy's time is over: its demand copies may begin by then."""
    if decides(step, state.rules):
        memory, params = parts.memory.prefetch, parts.params.prefetch
        parts.ask(step, state.cache, state.costs, state.plan, side, state.queue, memory, params)


@shared_njit
def recall(step: Step, first: int, log: Log, plan: Plan) -> int:
    """Fill `plan` as it was decided; returns the slots that copies may take at once."""
    transfers, on_cpu = 0, 0
    for i in range(step.expert.size):
        entry = log.plans[first + i]
        plan.state[i], plan.place[i], plan.stays[i] = entry & 3, entry >> 2 & 3, entry >> 4
        on_cpu += int(plan.place[i] == ON_CPU)
        if log.orders[first + i] >= 0:
            plan.order[log.orders[first + i]] = i
            transfers += 1
    plan.transfers, plan.on_cpu = transfers, on_cpu
    plan.evicted_active = log.slots[step.index, 1]
    return int(log.slots[step.index, 0])


@jitable
def run_step(
    parts: Parts | None, log: Log | None, lanes: Lanes, state: State, index: int, forward: int
) -> None:
    """Run one layer-step: dense part, decision, policy time, prefetches asked for, experts."""
    step, cache, costs, plan = state.step, state.cache, state.costs, state.plan
    queue, rules, tally, work = state.queue, state.rules, state.tally, state.work
    begin = lanes.now
    run_dense(lanes, work.dense_ns[index], step, cache, costs, queue, rules)
    first = work.offsets[index]
    slots = 0
    if parts is not None:
        slots = decide_step(parts, step, lanes, state, work.request[forward], first)
        write_slots(step, plan, slots, tally)
    if log is not None:
        slots = recall(step, first, log, plan)
    if decides(step, rules):
        slots -= run_policy(lanes, step, cache, costs, queue, rules)
    if parts is not None:
        ask_ahead(parts, step, state.side, state)
    if state.options.overlap:
        run_layer(lanes, step, plan, cache, costs, queue, rules, slots)
    else:
        writes_back = state.options.writes_back
        run_layer_serially(lanes, step, plan, cache, costs, slots, writes_back)
    if parts is not None:
        clear_layer(lanes, step, plan, cache, rules)
        now, layer = lanes.now, step.layer
        note(lanes, LOG_RESIDENTS, now, now, forward, layer, cache.used[layer])
        note(lanes, LOG_QUEUE, now, now, forward, layer, queue.end - queue.begin)
    tally.by_layer[step.layer, L_TIME] += lanes.now - begin


@jitable
def end_forward(parts: Parts | None, lanes: Lanes, state: State, forward: int) -> None:
    """End a forward: its head, the end of its request, and what the lanes have done in it."""
    work, cache, queue, tally = state.work, state.cache, state.queue, state.tally
    routed = work.step_offsets[forward + 1] - 1
    head_ns, rules = work.head_ns[forward], state.rules
    run_head(lanes, head_ns, forward, routed, cache, state.costs, queue, rules)
    if parts is not None:
        last = forward + 1 == work.request.size
        ends = last or work.request[forward + 1] != work.request[forward]
        if last or (ends and not state.options.persistent):
            abandon(cache, lanes, queue)
    tally.end_ns[forward] = lanes.now
    row = tally.by_phase[work.request[forward], work.phase[forward]]
    book_lanes(lanes, tally, row, lanes.now - tally.begin_ns[forward])


def replay(parts: Parts | None, log: Log | None, lanes: Lanes, state: State) -> None:
    """Replay `state.work`: see the head of this file for what None means."""
    work, step = state.work, state.step
    for forward in range(work.request.size):
        begin_forward(parts, lanes, state, forward)
        for index in range(work.step_offsets[forward], work.step_offsets[forward + 1]):
            point_at(step, work, index, forward)
            run_step(parts, log, lanes, state, index, forward)
        end_forward(parts, lanes, state, forward)


@functools.cache
def compiled_replay(parts: bool, log: bool) -> Callable[..., None]:
    """Return the machine code of `replay` with these arguments, None for the others."""
    signature = types.void(
        PARTS if parts else types.none,
        _LOG if log else types.none,
        Lanes.ref,
        State.ref,
    )
    compiled: Callable[..., None] = bare_njit(signature)(replay)
    return compiled


_ARRAYS = [types.Array(kind, 1, "C") for kind in (types.uint8, types.int16)]
_LOG = types.NamedTuple([*_ARRAYS, types.Array(types.int32, 2, "C")], Log)


def run(parts: Parts | None, log: Log | None, lanes: Lanes, state: State) -> None:
    """Replay compiled when all parts are, else with the loop in Python."""
    if parts is None or parts.compiled:
        opaque = None if parts is None else parts.opaque()
        loop = compiled_replay(parts is not None, log is not None)
        loop(opaque, log, lanes, state)
    else:
        replay(parts, log, lanes, state)
