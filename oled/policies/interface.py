"""Define what a policy sees and may write: the words of policies, simulator and executor.

Letters: L MoE layers, E routed experts a layer (the largest), A active experts of a layer-step,
S layer-steps, N = sum of A over all steps, H horizons of a predictor.

Every part of a policy is a *kernel*: a function over the structs below (`oled.policies.struct`),
its own memory and its own hyper-parameters, all with named fields. A kernel that carries the
`@kernel(ROLE)` mark is compiled once, on its own, and handed to the compiled driver as a function
pointer; so one driver serves every composition and nothing is compiled per combination. A plain
Python function (or method) with the same arguments is just as good: the same driver then runs in
Python and calls it step by step.
"""

from __future__ import annotations

import enum

import numpy as np

from oled.policies.kernel import Role
from oled.policies.struct import Cube, Matrix, Mutable, Struct, Vector

# Columns of `Step.mass`; see oled.trace.steps.
GATE, GATE_MASKED, CONF_MASKED, CONF_OPENED = 0, 1, 2, 3

# Plan.state: where an active expert is found when the layer's routing becomes known.
ABSENT, RESIDENT, LANDED, IN_FLIGHT = 0, 1, 2, 3

# Plan.place: where an active expert's work is done.
ON_GPU, TRANSFER, ON_CPU, DROPPED = 0, 1, 2, 3

# Cache.staged: an expert on its way into, or waiting in, a staging slot.
NOT_STAGED, COPYING, STAGED, STAGED_FILL = 0, 1, 2, 3

# Cache.fresh: bits that say how an expert came to the GPU.
PREFETCHED, TRANSFERRED = 1, 2

# Queue.kind: HOLD waits in staging for its layer's next routing; FILL joins the residents when it
# lands, if its score is above the lowest of them.
HOLD, FILL = 0, 1

# Rules.prefill: prefill forwards are decided like the others, streamed (scores learn from them,
# residency stays, misses are transferred), or bypassed (scores do not learn either).
PREFILL_POLICY, PREFILL_STREAM, PREFILL_BYPASS = 0, 1, 2

PREFILL = 0  # oled.trace.schema.Phase.PREFILL

NEVER = 2**62

STAMP_STEP = 1 << 32
"""Stamps are clock x 2^32 + the order of the last mention in the step, which has 31 bits."""


class Admission(enum.IntEnum):
    """How newcomers become residents."""

    DEMAND = 0  # every newcomer is inserted, the active set is protected
    COMPETE = 1  # residents and newcomers compete, the highest scores stay
    SEQUENTIAL = 2  # one expert after the other; may evict a member of the active set (naive LRU)
    FROZEN = 3  # nothing enters: a transferred expert is used once and discarded


class Step(Struct, mutable=True):
    """One layer-step: one MoE layer of one forward, as the router left it.

    The driver has one step and writes each layer-step into it: copy what you keep.
    """

    index: int  # layer-step s, 0..S-1
    forward: int
    layer: int  # 0..L-1 among the MoE layers
    phase: int  # oled.trace.schema.Phase
    block: int
    denoising_step: int  # within the block; -1 where there is none
    tokens: int  # T of the forward
    clock: int  # layer-steps since the run began; grows by one a step
    expert: Vector[np.uint16]  # [A] ids, ascending
    count: Vector[np.int32]  # [A] tokens routed to the expert
    mass: Matrix[np.float32]  # [A, 4] sums over tokens: GATE, GATE_MASKED, CONF_MASKED, CONF_OPENED
    last_token: Vector[np.int32]  # [A] order of the last mention (token-major)
    next_use: Vector[np.int64]  # [A] next layer-step of this expert, NEVER if none; [0] if unknown
    scores: Vector[np.float32]  # [E] mean router probability over the tokens; [0] if not recorded
    coming: Vector[
        np.float32
    ]  # [E] the same of this layer in the next forward, as predicted; or [0]


class At(Struct, mutable=True):
    """The start of a forward, for allocation."""

    forward: int
    phase: int
    block: int
    denoising_step: int
    first_of_request: bool


class Cache(Struct):
    """The state that policies read; the engine alone changes residency."""

    resident: Matrix[np.uint8]  # [L, E]
    score: Matrix[np.float64]  # [L, E] written by the retention: higher stays longer; a prefetcher
    # may refine those of a layer that comes next, which its retention then writes anew
    stamp: Matrix[np.int64]  # [L, E] last use, unique; ties of score go to the older one
    staged: Matrix[np.uint8]  # [L, E] NOT_STAGED, COPYING, STAGED, STAGED_FILL
    fresh: Matrix[np.uint8]  # [L, E] PREFETCHED | TRANSFERRED
    capacity: Vector[np.int64]  # [L] resident slots of each layer; written by the allocation
    used: Vector[np.int64]  # [L] residents of each layer
    resident_bytes: Mutable[int]  # of all layers
    budget_bytes: int  # the most resident bytes (global scope)
    staged_experts: Mutable[int]  # on their way into, or waiting in, staging slots
    num_experts: Vector[np.int64]  # [L]
    expert_bytes: Vector[np.int64]  # [L]
    prior: Matrix[np.float64]  # [L, E] popularity from calibration; zeros without
    key: Vector[np.float64]  # scratch of the selection, [>= 2 E]
    age: Vector[np.int64]  # scratch
    item: Vector[np.int64]  # scratch


class Costs(Struct):
    """Integer nanoseconds of this machine; see oled.hardware.costs."""

    layer_class: Vector[np.int64]  # [L] row of the tables below
    gpu_ns: Cube[np.int64]  # [class, tokens, experts] one launch group
    cpu_ns: Matrix[np.int64]  # [class, tokens] one expert
    copy_ns: Vector[np.int64]  # [class] one queued copy, host to device
    copy_out_ns: Vector[np.int64]  # [class] one copy back
    act_out_ns: Vector[np.int64]  # [T + 1] activations to the host
    act_back_ns: Vector[np.int64]  # [T + 1]
    copy_wake_ns: int  # added to a copy that finds the link idle
    cpu_call_ns: int  # per batch of CPU experts
    policy_ns: int  # per layer-step, on the critical path
    cpu_contention_ppm: int  # speed of the CPU while the link copies, in millionths
    link_contention_ppm: int  # speed of the link while the CPU computes
    top_k: int


class Plan(Struct):
    """What is decided for one layer-step; arrays are indexed by the position in the active set."""

    state: Vector[np.uint8]  # [E] ABSENT, RESIDENT, LANDED, IN_FLIGHT
    place: Vector[np.uint8]  # [E] written by the dispatch: ON_GPU, TRANSFER, ON_CPU, DROPPED
    rank: Vector[np.float64]  # [E] written by the dispatch: transfers go in ascending rank, then id
    stays: Vector[np.uint8]  # [E] 1 if the newcomer becomes resident
    order: Vector[np.int64]  # [E] the transfers, first to last
    evicted: Vector[np.int64]  # [L*E] layer * E + expert
    index: Vector[np.int64]  # [E] place in the active set, -1
    transfers: Mutable[int]  # entries of `order`
    evictions: Mutable[int]  # entries of `evicted`
    evicted_active: Mutable[int]  # of these: active residents, which compute before they leave
    on_cpu: Mutable[int]
    late: Mutable[int]  # needed while still on the link


class Rules(Struct):
    """How a composition and the cache settings bind the parts together."""

    admission: int  # Admission
    by_mention: bool  # sequential admission in the order of mention, not of ids
    overshoot: bool  # accounting replay: unbounded staging
    pooled: bool  # one byte budget for all layers
    staging: int  # staging slots, one pool for all layers
    prefill: int  # PREFILL_*


class Side(Struct):
    """What prefetchers may look at: recorded predictions, and the routing itself for the dial."""

    offsets: Vector[np.int64]  # [S + 1]
    expert: Vector[np.uint16]  # [N]
    layer: Vector[np.int64]  # [S]
    forward: Vector[np.int64]  # [S]
    forward_request: Vector[np.int64]  # [F]
    pred_offsets: Vector[np.int64]  # [S * H + 1] row s * H + h - 1: h MoE layers ahead, where
    # counting goes on from the last layer to the first of the next forward
    pred_expert: Vector[np.uint16]
    pred_score: Vector[np.float32]
    horizons: int  # H; 0 without predictions
    store: Cube[np.float64]  # [M, L, E] activation matrices of the calibration trace
    seed: int


class Queue(Struct):
    """Prefetches asked for and not begun; a prefetcher may append, or clear and write anew."""

    layer: Vector[np.int64]  # [capacity]
    expert: Vector[np.int64]
    kind: Vector[np.int64]  # HOLD or FILL
    due: Vector[np.int64]  # the layer-step it is meant for; dropped unbegun from then on
    chunks: Vector[np.int64]  # pieces of the copy; demand copies pass between two pieces
    begin: Mutable[int]  # the first entry
    end: Mutable[int]  # one past the last entry


OBSERVE = Role("observe", Step, Cache)
"""Retention: update `cache.score[step.layer]` with this layer-step's routing."""

WATCH = Role("watch", Step, Cache)
"""Allocation, at every layer-step before the scores change: gather statistics in `memory`."""

ALLOCATE = Role("allocate", At, Cache)
"""Allocation, at the start of every forward: rewrite `cache.capacity`, keeping its sum."""

DISPATCH = Role("dispatch", Step, Cache, Costs, Plan)
"""Dispatch: `plan.place` and `plan.rank`; misses arrive as TRANSFER, everything else as ON_GPU."""

ASK = Role("ask", Step, Cache, Costs, Plan, Side, Queue)
"""Prefetch: append to `queue`, or clear it (`begin` and `end` 0) and write it anew."""

ROLES = (OBSERVE, WATCH, ALLOCATE, DISPATCH, ASK)
"""In the order in which the driver takes their functions."""
