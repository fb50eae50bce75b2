"""What a policy sees and what it may write: the words shared by policies, simulator and executor.

Letters: L MoE layers, E routed experts a layer (the largest), A active experts of a layer-step,
S layer-steps, N = sum of A over all steps, H horizons of a predictor.

Every part of a policy is a *kernel*: a function of one fixed signature over the named tuples below.
A kernel that carries the `@kernel(SIGNATURE)` mark is compiled once, on its own, and handed to the
compiled driver as a function pointer; so one driver serves every composition, a new part compiles
in about a second, and nothing is compiled per combination. A plain Python function (or method) of
the same signature is just as good: the same driver then runs in Python and calls it step by step.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit

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

# Plan.count
N_TRANSFERS, N_EVICTED, N_EVICTED_ACTIVE, N_CPU, N_LATE = 0, 1, 2, 3, 4

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


class Step(NamedTuple):
    """One layer-step: one MoE layer of one forward, as the router left it."""

    index: int  # type: ignore[assignment]  # layer-step s, 0..S-1
    forward: int
    layer: int  # 0..L-1 among the MoE layers
    phase: int  # oled.trace.schema.Phase
    block: int
    denoising_step: int  # within the block; -1 where there is none
    tokens: int  # T of the forward
    clock: int  # layer-steps since the run began; grows by one a step
    expert: NDArray[np.uint16]  # [A] ids, ascending
    count: NDArray[np.int32]  # type: ignore[assignment]  # [A] tokens routed to the expert
    mass: NDArray[
        np.float32
    ]  # [A, 4] sums over tokens: GATE, GATE_MASKED, CONF_MASKED, CONF_OPENED
    last_token: NDArray[np.int32]  # [A] order of the last mention (token-major)
    next_use: NDArray[np.int64]  # [A] next layer-step of this expert, NEVER if none; [0] if unknown
    scores: NDArray[np.float32]  # [E] mean router probability over the tokens; [0] if not recorded
    coming: NDArray[
        np.float32
    ]  # [E] the same of this layer in the next forward, as predicted; [0] if not


class At(NamedTuple):
    """The start of a forward, for allocation."""

    forward: int
    phase: int
    block: int
    denoising_step: int
    first_of_request: int  # 1 for the first forward of a request


class Cache(NamedTuple):
    """The state that policies read; the engine alone changes residency."""

    resident: NDArray[np.uint8]  # [L, E]
    score: NDArray[np.float64]  # [L, E] written by the retention: higher stays longer; a prefetcher
    # may refine those of a layer that comes next, which its retention then writes anew
    stamp: NDArray[np.int64]  # [L, E] last use, unique; ties of score go to the older one
    staged: NDArray[np.uint8]  # [L, E] NOT_STAGED, COPYING, STAGED, STAGED_FILL
    fresh: NDArray[np.uint8]  # [L, E] PREFETCHED | TRANSFERRED
    capacity: NDArray[np.int64]  # [L] resident slots of each layer; written by the allocation
    used: NDArray[np.int64]  # [L] residents of each layer
    total: NDArray[np.int64]  # [3] resident bytes, budget in bytes (global scope), staged experts
    num_experts: NDArray[np.int64]  # [L]
    expert_bytes: NDArray[np.int64]  # [L]
    prior: NDArray[np.float64]  # [L, E] popularity from calibration; zeros without
    key: NDArray[np.float64]  # scratch of the selection, [>= 2 E]
    age: NDArray[np.int64]  # scratch
    item: NDArray[np.int64]  # scratch


class Costs(NamedTuple):
    """Integer nanoseconds of this machine; see oled.hardware.costs."""

    layer_class: NDArray[np.int64]  # [L] row of the tables below
    gpu_ns: NDArray[np.int64]  # [class, tokens, experts] one launch group
    cpu_ns: NDArray[np.int64]  # [class, tokens] one expert
    copy_ns: NDArray[np.int64]  # [class] one queued copy, host to device
    copy_out_ns: NDArray[np.int64]  # [class] one copy back
    act_out_ns: NDArray[np.int64]  # [T + 1] activations to the host
    act_back_ns: NDArray[np.int64]  # [T + 1]
    copy_wake_ns: int  # added to a copy that finds the link idle
    cpu_call_ns: int  # per batch of CPU experts
    policy_ns: int  # per layer-step, on the critical path
    cpu_contention_ppm: int  # speed of the CPU while the link copies, in millionths
    link_contention_ppm: int  # speed of the link while the CPU computes
    top_k: int


class Plan(NamedTuple):
    """What is decided for one layer-step; arrays are indexed by the position in the active set."""

    state: NDArray[np.uint8]  # [E] ABSENT, RESIDENT, LANDED, IN_FLIGHT
    place: NDArray[np.uint8]  # [E] written by the dispatch: ON_GPU, TRANSFER, ON_CPU, DROPPED
    rank: NDArray[
        np.float64
    ]  # [E] written by the dispatch: transfers go in ascending rank, then id
    stays: NDArray[np.uint8]  # [E] 1 if the newcomer becomes resident
    order: NDArray[np.int64]  # [E] the transfers, first to last
    evicted: NDArray[np.int64]  # [L*E] layer * E + expert
    index: NDArray[np.int64]  # type: ignore[assignment]  # [E] place in the active set, -1
    count: NDArray[np.int64]  # type: ignore[assignment]  # [8] N_TRANSFERS, N_EVICTED, N_EVICTED_ACTIVE, N_CPU, N_LATE


class Rules(NamedTuple):
    """How a composition and the cache settings bind the parts together."""

    admission: int  # Admission
    by_mention: bool  # sequential admission in the order of mention, not of ids
    overshoot: bool  # accounting replay: unbounded staging
    pooled: bool  # one byte budget for all layers
    staging: int  # staging slots, one pool for all layers
    prefill: int  # PREFILL_*


class Side(NamedTuple):
    """What prefetchers may look at: recorded predictions, and the routing itself for the dial."""

    offsets: NDArray[np.int64]  # [S + 1]
    expert: NDArray[np.uint16]  # [N]
    step_layer: NDArray[np.int64]  # [S]
    step_forward: NDArray[np.int64]  # [S]
    forward_request: NDArray[np.int64]  # [F]
    pred_offsets: NDArray[np.int64]  # [S * H + 1] row s * H + h - 1: h MoE layers ahead, where
    # counting goes on from the last layer to the first of the next forward
    pred_expert: NDArray[np.uint16]
    pred_score: NDArray[np.float32]
    horizons: int  # H; 0 without predictions
    store: NDArray[np.float64]  # [M, L, E] activation matrices of the calibration trace
    seed: int


class Queue(NamedTuple):
    """Prefetches asked for and not begun; a prefetcher may append, or clear and write anew."""

    layer: NDArray[np.int64]  # [capacity]
    expert: NDArray[np.int64]
    kind: NDArray[np.int64]  # HOLD or FILL
    due: NDArray[np.int64]  # the layer-step it is meant for; dropped unbegun from then on
    chunks: NDArray[np.int64]  # pieces of the copy; demand copies pass between two pieces
    span: NDArray[np.int64]  # [2] first and one past the last entry


def _examples() -> tuple[Step, At, Cache, Costs, Plan, Side, Queue]:
    u1: Any = np.zeros(1, np.uint8)
    u2: Any = np.zeros(1, np.uint16)
    i4: Any = np.zeros(1, np.int32)
    i8: Any = np.zeros(1, np.int64)
    f4, f8 = np.zeros(1, np.float32), np.zeros(1, np.float64)
    u1x2: Any = np.zeros((1, 1), np.uint8)
    i8x2: Any = np.zeros((1, 1), np.int64)
    f8x2: Any = np.zeros((1, 1))
    step = Step(0, 0, 0, 0, 0, 0, 0, 0, u2, i4, np.zeros((1, 4), np.float32), i4, i8, f4, f4)
    at = At(0, 0, 0, 0, 0)
    cache = Cache(u1x2, f8x2, i8x2, u1x2, u1x2, i8, i8, i8, i8, i8, f8x2, f8, i8, i8)
    costs = Costs(i8, np.zeros((1, 1, 1), np.int64), i8x2, i8, i8, i8, i8, 0, 0, 0, 0, 0, 0)
    plan = Plan(u1, u1, f8, u1, i8, i8, i8, i8)
    side = Side(i8, u2, i8, i8, i8, i8, u2, f4, 0, np.zeros((1, 1, 1)), 0)
    return step, at, cache, costs, plan, side, Queue(i8, i8, i8, i8, i8, i8)


STEP, AT, CACHE, COSTS, PLAN, SIDE, QUEUE = (numba.typeof(x) for x in _examples())
_MEMORY = types.Array(types.float64, 3, "C")
_PARAMS = types.Array(types.float64, 1, "C")

OBSERVE = types.void(STEP, CACHE, _MEMORY, _PARAMS)
"""Retention: update `cache.score[step.layer]` with this layer-step's routing."""

WATCH = types.void(STEP, CACHE, _MEMORY, _PARAMS)
"""Allocation, at every layer-step before the scores change: gather statistics in `memory`."""

ALLOCATE = types.void(AT, CACHE, _MEMORY, _PARAMS)
"""Allocation, at the start of every forward: rewrite `cache.capacity`, keeping its sum."""

DISPATCH = types.void(STEP, CACHE, COSTS, PLAN, _MEMORY, _PARAMS)
"""Dispatch: `plan.place` and `plan.rank`; misses arrive as TRANSFER, everything else as ON_GPU."""

ASK = types.void(STEP, CACHE, COSTS, PLAN, SIDE, QUEUE, _MEMORY, _PARAMS)
"""Prefetch: append to `queue`, or clear it (both of `span` 0) and write it anew."""


class Kernel:
    """A part's function; `compiled()` gives its machine code, made on first use, cached on disk."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self.function = function
        self.signature = signature
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> None:
        self.compiled()(*args)

    @functools.cache  # noqa: B019  (kernels live as long as their module)
    def compiled(self) -> Callable[..., None]:
        compiled: Callable[..., None] = bare_njit(self.signature)(self.function)
        return compiled


def kernel(signature: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Mark a function as a compiled kernel of the given signature (OBSERVE, DISPATCH, ...)."""

    def mark(function: Callable[..., None]) -> Kernel:
        return Kernel(function, signature)

    return mark
