"""Everything that a replay reads and writes, and how a layer-step is taken from a workload."""

from __future__ import annotations

import numpy as np

from oled._jit import jitable
from oled.policies.interface import At, Cache, Costs, Plan, Queue, Rules, Side, Step
from oled.policies.struct import Matrix, Struct, Vector
from oled.sim.tally import Tally


class Workload(Struct):
    """The routing to replay: `oled.trace.steps.Steps` as arrays. F forwards, S layer-steps."""

    request: Vector[np.int64]  # [F] 0.. consecutive
    phase: Vector[np.int64]
    block: Vector[np.int64]
    denoising_step: Vector[np.int64]
    tokens: Vector[np.int64]
    step_offsets: Vector[np.int64]  # [F + 1]
    layer: Vector[np.int64]  # [S]
    offsets: Vector[np.int64]  # [S + 1]
    expert: Vector[np.uint16]  # [N]
    count: Vector[np.int32]
    mass: Matrix[np.float32]  # [N, 4]
    last_token: Vector[np.int32]
    next_use: Vector[np.int64]  # [N] or [0]
    scores: Matrix[np.float32]  # [S, E] or [1, 0]
    coming: Matrix[np.float32]  # [S, E] or [1, 0]
    head_ns: Vector[np.int64]  # [F]
    dense_ns: Vector[np.int64]  # [S]


class Options(Struct):
    """How the clock runs."""

    persistent: bool  # residency outlives a request
    overlap: bool  # False: a blocking runtime
    writes_back: bool  # evicted experts are copied to the host (blocking runtime only)
    log_from: int  # first forward of the timeline
    log_to: int  # one past the last


class Start(Struct):
    """What a request (or the run) begins with."""

    resident: Matrix[np.uint8]  # [L, E]
    capacity: Vector[np.int64]  # [L]


class State(Struct):
    """All that a replay works on besides parts and lanes; `step` and `at` are where it stands."""

    work: Workload
    start: Start
    cache: Cache
    costs: Costs
    plan: Plan
    side: Side
    queue: Queue
    rules: Rules
    options: Options
    tally: Tally
    step: Step
    at: At


@jitable
def point_at(step: Step, work: Workload, index: int, forward: int) -> None:
    """Let `step` be layer-step `index` of `forward`; views, nothing is copied."""
    lo, hi = work.offsets[index], work.offsets[index + 1]
    step.index, step.forward, step.layer = index, forward, work.layer[index]
    step.phase, step.block = work.phase[forward], work.block[forward]
    step.denoising_step, step.tokens = work.denoising_step[forward], work.tokens[forward]
    step.clock = index + 1
    step.expert, step.count = work.expert[lo:hi], work.count[lo:hi]
    step.mass, step.last_token = work.mass[lo:hi], work.last_token[lo:hi]
    next_lo, next_hi = (lo, hi) if work.next_use.size > 0 else (0, 0)
    step.next_use = work.next_use[next_lo:next_hi]
    step.scores = work.scores[index if work.scores.shape[1] > 0 else 0]
    step.coming = work.coming[index if work.coming.shape[1] > 0 else 0]


def no_step(work: Workload) -> Step:
    """Return a step for `point_at` to write into."""
    return Step(
        index=-1,
        forward=-1,
        layer=0,
        phase=0,
        block=-1,
        denoising_step=-1,
        tokens=0,
        clock=0,
        expert=work.expert[:0],
        count=work.count[:0],
        mass=work.mass[:0],
        last_token=work.last_token[:0],
        next_use=work.next_use[:0],
        scores=work.scores.reshape(-1)[:0],
        coming=work.coming.reshape(-1)[:0],
    )


def step_of(work: Workload, index: int, forward: int) -> Step:
    """Return layer-step `index` of `forward`; views, nothing is copied."""
    step = no_step(work)
    point_at(step, work, index, forward)
    return step
