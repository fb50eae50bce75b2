"""The driver: one loop over forwards and layer-steps, compiled or in Python.

The same source runs both ways. Compiled, the parts of a policy arrive as function pointers; with a
part in plain Python, the loop itself runs in Python and everything around that part stays compiled.
Results are equal to the nanosecond and the byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import register_jitable
from numpy.typing import NDArray

from oled._jit import bare_njit
from oled.policies import interface
from oled.policies.admission import fit_capacity
from oled.policies.decide import decide, decides
from oled.policies.interface import (
    COPYING,
    N_EVICTED,
    NOT_STAGED,
    PREFETCHED,
    TRANSFERRED,
    At,
    Cache,
    Costs,
    Plan,
    Queue,
    Rules,
    Side,
    Step,
)
from oled.sim.clock import run_dense, run_head, run_layer, run_policy
from oled.sim.lanes import (
    IDLE,
    LINK_ENDED,
    LINK_WHAT,
    LOG_QUEUE,
    LOG_RESIDENTS,
    MOVED,
    NOW,
    P_CHUNKS,
    WASTED,
    Lanes,
    note,
)
from oled.sim.serial import run_layer_serially
from oled.sim.staging import clear_layer
from oled.sim.tally import (
    L_TIME,
    Tally,
    book_evicted,
    book_lanes,
    count_step,
    write_plan,
    write_slots,
)


class Workload(NamedTuple):
    """The routing to replay: `oled.trace.steps.Steps` as arrays. F forwards, S layer-steps."""

    request: NDArray[np.int64]  # [F] 0.. consecutive
    phase: NDArray[np.int64]
    block: NDArray[np.int64]
    denoising_step: NDArray[np.int64]
    tokens: NDArray[np.int64]
    step_offsets: NDArray[np.int64]  # [F + 1]
    layer: NDArray[np.int64]  # [S]
    offsets: NDArray[np.int64]  # [S + 1]
    expert: NDArray[np.uint16]  # [N]
    count: NDArray[np.int32]  # type: ignore[assignment]
    mass: NDArray[np.float32]  # [N, 4]
    last_token: NDArray[np.int32]
    next_use: NDArray[np.int64]  # [N] or [0]
    scores: NDArray[np.float32]  # [S, E] or [1, 0]
    coming: NDArray[np.float32]  # [S, E] or [1, 0]
    head_ns: NDArray[np.int64]  # [F]
    dense_ns: NDArray[np.int64]  # [S]


class Options(NamedTuple):
    persistent: bool
    overlap: bool  # False: a blocking runtime
    writes_back: bool  # evicted experts are copied to the host (blocking runtime only)
    log_from: int  # first forward of the timeline
    log_to: int  # one past the last


class Start(NamedTuple):
    """What a request (or the run) begins with."""

    resident: NDArray[np.uint8]  # [L, E]
    capacity: NDArray[np.int64]  # [L]


@bare_njit
def abandon(cache: Cache, lanes: Lanes, queue: Queue) -> None:
    """A request is over: what was fetched ahead and not used since was fetched in vain.

    A copy that is on its way is given up and counts as made.
    """
    layers, experts = cache.resident.shape
    for layer in range(layers):
        for expert in range(experts):
            if cache.staged[layer, expert] == COPYING:
                lanes.moved[MOVED] += cache.expert_bytes[layer]
            if cache.staged[layer, expert] != NOT_STAGED or cache.fresh[layer, expert] & PREFETCHED:
                lanes.moved[WASTED] += cache.expert_bytes[layer]
            cache.staged[layer, expert] = NOT_STAGED
            cache.fresh[layer, expert] &= TRANSFERRED
    cache.total[2] = 0
    queue.span[0] = queue.span[1] = 0
    if lanes.t[LINK_WHAT] != IDLE:
        lanes.t[LINK_WHAT], lanes.t[LINK_ENDED] = IDLE, lanes.t[NOW]
    lanes.paused[P_CHUNKS] = 0


@bare_njit
def reset(cache: Cache, start: Start) -> None:
    """Begin afresh: initial residents, scores from the prior."""
    layers, experts = cache.resident.shape
    cache.total[0] = 0
    for layer in range(layers):
        cache.capacity[layer] = start.capacity[layer]
        cache.used[layer] = 0
        for expert in range(experts):
            cache.fresh[layer, expert] = 0
            cache.score[layer, expert] = cache.prior[layer, expert]
            cache.stamp[layer, expert] = -1 - expert
            cache.resident[layer, expert] = start.resident[layer, expert]
            if start.resident[layer, expert] != 0:
                cache.used[layer] += 1
                cache.total[0] += cache.expert_bytes[layer]


@bare_njit
def clear(memory: NDArray[np.float64]) -> None:
    for i in range(memory.shape[0]):
        for j in range(memory.shape[1]):
            for k in range(memory.shape[2]):
                memory[i, j, k] = 0.0


@bare_njit
def fit_capacities(cache: Cache, plan: Plan, lanes: Lanes) -> None:
    """After an allocation: layers whose capacity was cut lose their lowest residents at once."""
    plan.count[N_EVICTED] = 0
    for layer in range(cache.capacity.size):
        fit_capacity(layer, cache, plan)
    book_evicted(cache, plan, lanes)


@register_jitable(_nrt=False, error_model="numpy", forceinline=True)  # type: ignore[untyped-decorator]
def step_of(work: Workload, index: int, forward: int) -> Step:
    """Layer-step `index` of `forward` as the parts see it; views, nothing is copied."""
    lo, hi = work.offsets[index], work.offsets[index + 1]
    row = index if work.scores.shape[1] > 0 else 0
    coming = index if work.coming.shape[1] > 0 else 0
    next_lo, next_hi = (lo, hi) if work.next_use.size > 0 else (0, 0)
    return Step(
        index,
        forward,
        work.layer[index],
        work.phase[forward],
        work.block[forward],
        work.denoising_step[forward],
        work.tokens[forward],
        index + 1,
        work.expert[lo:hi],
        work.count[lo:hi],
        work.mass[lo:hi],
        work.last_token[lo:hi],
        work.next_use[next_lo:next_hi],
        work.scores[row],
        work.coming[coming],
    )


def replay(
    observe: Callable[..., None],
    watch: Callable[..., None],
    allocate: Callable[..., None],
    dispatch: Callable[..., None],
    ask: Callable[..., None],
    params: tuple[NDArray[np.float64], ...],
    memory: tuple[NDArray[np.float64], ...],
    learned: tuple[bool, ...],
    work: Workload,
    cache: Cache,
    start: Start,
    costs: Costs,
    plan: Plan,
    side: Side,
    queue: Queue,
    lanes: Lanes,
    rules: Rules,
    options: Options,
    tally: Tally,
) -> None:
    """Replay `work`. `params`, `memory` and `learned` belong to retention, allocation, dispatch and
    prefetch, in this order; memory that is not learned is cleared with each request.
    """
    last_request = -1
    before = tally.before
    for forward in range(work.request.size):
        request, phase = work.request[forward], work.phase[forward]
        first = request != last_request
        if first and (last_request < 0 or not options.persistent):
            reset(cache, start)
            for j in range(4):
                if not learned[j]:
                    clear(memory[j])
        last_request = request
        lanes.logged[1] = options.log_from <= forward < options.log_to
        begin = lanes.t[NOW]
        at = At(forward, phase, work.block[forward], work.denoising_step[forward], int(first))
        allocate(at, cache, memory[1], params[1])
        if not rules.pooled and not rules.overshoot:
            fit_capacities(cache, plan, lanes)
        for index in range(work.step_offsets[forward], work.step_offsets[forward + 1]):
            layer = work.layer[index]
            step = step_of(work, index, forward)
            layer_begin = lanes.t[NOW]
            run_dense(lanes, work.dense_ns[index], step, cache, costs, queue, rules)
            slots = decide(
                observe, watch, dispatch, params, memory, step, cache, costs, plan, rules
            )
            count_step(step, cache, plan, lanes, tally, request)
            write_plan(step, plan, tally, work.offsets[index])
            write_slots(step, plan, slots, tally)
            if decides(step, rules):
                ask(step, cache, costs, plan, side, queue, memory[3], params[3])
                slots -= run_policy(lanes, step, cache, costs, queue, rules)
            if options.overlap:
                run_layer(lanes, step, plan, cache, costs, queue, rules, slots)
            else:
                run_layer_serially(lanes, step, plan, cache, costs, slots, options.writes_back)
            clear_layer(lanes, step, plan, cache, rules)
            now = lanes.t[NOW]
            note(lanes, LOG_RESIDENTS, now, now, forward, layer, cache.used[layer])
            waiting = queue.span[1] - queue.span[0]
            note(lanes, LOG_QUEUE, now, now, forward, layer, waiting)
            tally.by_layer[layer, L_TIME] += now - layer_begin
        routed = work.step_offsets[forward + 1] - 1
        run_head(lanes, work.head_ns[forward], forward, routed, cache, costs, queue, rules)
        last = forward + 1 == work.request.size
        if last or (not options.persistent and work.request[forward + 1] != request):
            abandon(cache, lanes, queue)
        tally.begin_ns[forward], tally.end_ns[forward] = begin, lanes.t[NOW]
        book_lanes(lanes, before, tally.by_phase[request, phase], lanes.t[NOW] - begin)


@functools.cache
def compiled_replay(signature: tuple[Any, ...]) -> Callable[..., None]:
    """Machine code of `replay` for data arguments of these numba types; cached on disk."""
    pointers = tuple(
        types.FunctionType(sig)
        for sig in (
            interface.OBSERVE,
            interface.WATCH,
            interface.ALLOCATE,
            interface.DISPATCH,
            interface.ASK,
        )
    )
    compiled: Callable[..., None] = bare_njit(types.void(*pointers, *signature))(replay)
    return compiled


def run(parts: tuple[Any, ...], *data: Any) -> None:
    """Replay with five part functions: compiled when all are kernels, else the loop in Python."""
    if all(isinstance(part, interface.Kernel) for part in parts):
        signature = tuple(numba.typeof(argument) for argument in data)
        compiled_replay(signature)(*(part.compiled() for part in parts), *data)
        return
    functions = [p.compiled() if isinstance(p, interface.Kernel) else p for p in parts]
    arguments: list[Any] = [*functions, *data]
    replay(*arguments)
