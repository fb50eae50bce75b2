"""The lanes of the machine and the copies on the link: state of the clock, in integer nanoseconds.

Lanes: GPU compute, H2D link, D2H link, CPU workers. One copy at a time is on the H2D link and it is
never pre-empted (a prefetch cut into chunks lets demand copies pass between two chunks). Work that
can be slowed down by the other lane is kept in millionths of a nanosecond, so that rates are whole
numbers and results do not depend on rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled._jit import bare_njit, inner_njit
from oled.policies.interface import (
    COPYING,
    FILL,
    NOT_STAGED,
    STAGED,
    STAGED_FILL,
    Cache,
    Costs,
    Queue,
)

PPM = 1_000_000

# Lanes.t
NOW, LINK_WHAT, LINK_LEFT, LINK_ENDED, LINK_BEGAN, CPU_BEGIN, CPU_LEFT, GPU_UNTIL = range(8)

# Lanes.t[LINK_WHAT]
IDLE, DEMAND, AHEAD = 0, 1, 2

# Lanes.copying and Lanes.paused: the prefetch on the link, and one that waits between two chunks.
# P_CHUNKS: pieces that have not crossed; P_LEFT: ns of copying of those that have not begun.
P_LAYER, P_EXPERT, P_KIND, P_DUE, P_CHUNKS, P_LEFT = range(6)

# Lanes.busy
GPU, H2D, D2H, CPU = range(4)

# Lanes.stall
COPY_STALL, CPU_STALL, POLICY_STALL = range(3)

# Kinds of timeline entries.
LOG_HEAD, LOG_DENSE, LOG_HITS, LOG_LANDED, LOG_COPY, LOG_PREFETCH, LOG_CPU, LOG_OUT, LOG_POLICY = (
    range(9)
)
LOG_RESIDENTS, LOG_QUEUE, LOG_BACK, LOG_USE = 9, 10, 11, 12


class Lanes(NamedTuple):
    t: NDArray[np.int64]  # [8]
    copying: NDArray[np.int64]  # [6] P_*
    paused: NDArray[np.int64]  # [6]; P_CHUNKS 0: none
    due: NDArray[np.int64]  # [L, E] the layer-step that a staged expert was fetched for
    busy: NDArray[np.int64]  # [4] ns of work done by each lane
    stall: NDArray[np.int64]  # [3] ns that the GPU stood still
    moved: NDArray[np.int64]  # [4] bytes: host to device, prefetch useful, wasted, late
    log: NDArray[np.int64]  # [capacity, 6] kind, begin, end, forward, layer, item
    logged: NDArray[np.int64]  # [2] entries, whether recording is on


MOVED, USEFUL, WASTED, LATE = range(4)


def new_lanes(log_capacity: int, layers: int, experts: int) -> Lanes:
    i8 = np.int64
    lanes = Lanes(
        np.zeros(8, i8),
        np.zeros(6, i8),
        np.zeros(6, i8),
        np.zeros((layers, experts), i8),
        np.zeros(4, i8),
        np.zeros(3, i8),
        np.zeros(4, i8),
        np.zeros((max(1, log_capacity), 6), i8),
        np.zeros(2, i8),
    )
    lanes.t[LINK_ENDED] = -1  # the first copy of a run finds the link asleep
    return lanes


@bare_njit
def note(
    lanes: Lanes, kind: int, begin: int, end: int, forward: int, layer: int, item: int
) -> None:
    """Write one timeline entry, while recording is on and room is left."""
    n = lanes.logged[0]
    if lanes.logged[1] == 0 or n >= lanes.log.shape[0]:
        return
    row = lanes.log[n]
    row[0], row[1], row[2], row[3], row[4], row[5] = kind, begin, end, forward, layer, item
    lanes.logged[0] = n + 1


@inner_njit
def put_on_link(lanes: Lanes, what: int, work_ns: int, wake_ns: int) -> None:
    """Begin a copy now. A link that stood still needs `wake_ns` more (isolated copy latency)."""
    t = lanes.t
    if t[LINK_ENDED] < t[NOW]:
        work_ns += wake_ns
    t[LINK_WHAT], t[LINK_LEFT], t[LINK_BEGAN] = what, work_ns * PPM, t[NOW]


@inner_njit
def both_read(lanes: Lanes) -> bool:
    """Whether link and CPU read host memory at this moment: each slows the other down."""
    t = lanes.t
    return bool(t[LINK_WHAT] != IDLE and t[CPU_LEFT] > 0 and t[CPU_BEGIN] <= t[NOW])


@inner_njit
def pass_time(lanes: Lanes, until: int, link_rate: int, cpu_rate: int) -> None:
    """Let time pass to `until` at the present rates; no event lies in between."""
    t = lanes.t
    elapsed = until - t[NOW]
    if t[LINK_WHAT] != IDLE:
        t[LINK_LEFT] -= elapsed * link_rate
        lanes.busy[H2D] += elapsed
    if t[CPU_LEFT] > 0 and t[CPU_BEGIN] <= t[NOW]:
        t[CPU_LEFT] -= elapsed * cpu_rate
        lanes.busy[CPU] += elapsed
    t[NOW] = until


@inner_njit
def finish_time(now: int, left: int, rate: int) -> int:
    if rate == PPM:  # by far the most frequent, and a constant divides faster
        return now + (left + PPM - 1) // PPM
    return now + (left + rate - 1) // rate


@inner_njit
def take_prefetch(
    lanes: Lanes, queue: Queue, cache: Cache, costs: Costs, routed: int, room: int
) -> int:
    """Put the next prefetch on an idle link; returns the staging slots newly taken, -1 if none.

    A prefetch cut short goes on first. Entries whose expert is resident or on its way already, or
    whose layer-step is not later than `routed`, are dropped. `room`: staging slots it may take.
    """
    if lanes.paused[P_CHUNKS] > 0:
        for j in range(lanes.paused.size):
            lanes.copying[j] = lanes.paused[j]
        lanes.paused[P_CHUNKS] = 0
        _begin_chunk(lanes, costs)
        return 0
    span = queue.span
    while span[0] < span[1]:
        head = span[0]
        layer, expert = queue.layer[head], queue.expert[head]
        here = cache.staged[layer, expert] != NOT_STAGED or cache.resident[layer, expert] != 0
        if here or queue.due[head] <= routed:
            span[0] += 1
            continue
        if room <= 0:
            return -1
        span[0] += 1
        lanes.copying[P_LAYER], lanes.copying[P_EXPERT] = layer, expert
        lanes.copying[P_KIND], lanes.copying[P_DUE] = queue.kind[head], queue.due[head]
        lanes.copying[P_CHUNKS] = max(1, queue.chunks[head])
        lanes.copying[P_LEFT] = costs.copy_ns[costs.layer_class[layer]]
        lanes.due[layer, expert] = queue.due[head]
        cache.staged[layer, expert] = COPYING
        cache.total[2] += 1
        _begin_chunk(lanes, costs)
        return 1
    return -1


@inner_njit
def _begin_chunk(lanes: Lanes, costs: Costs) -> None:
    """Put the next piece of `lanes.copying` on the link; the pieces add up to one whole copy."""
    piece = lanes.copying[P_LEFT] // lanes.copying[P_CHUNKS]
    lanes.copying[P_LEFT] -= piece
    put_on_link(lanes, AHEAD, piece, costs.copy_wake_ns)


@inner_njit
def end_chunk(lanes: Lanes, cache: Cache, forward: int) -> bool:
    """A prefetch (or a chunk of it) has crossed the link; True if the whole expert has landed."""
    layer, expert = lanes.copying[P_LAYER], lanes.copying[P_EXPERT]
    note(lanes, LOG_PREFETCH, lanes.t[LINK_BEGAN], lanes.t[NOW], forward, layer, expert)
    lanes.t[LINK_WHAT], lanes.t[LINK_ENDED] = IDLE, lanes.t[NOW]
    lanes.copying[P_CHUNKS] -= 1
    if lanes.copying[P_CHUNKS] > 0:
        for j in range(lanes.paused.size):
            lanes.paused[j] = lanes.copying[j]
        return False
    cache.staged[layer, expert] = STAGED_FILL if lanes.copying[P_KIND] == FILL else STAGED
    lanes.moved[MOVED] += cache.expert_bytes[layer]
    return True


@inner_njit
def group_ns(costs: Costs, layer: int, assignments: int, experts: int) -> int:
    """GPU time of one launch group; `assignments` is the sum of its experts' token counts."""
    tokens = (assignments + costs.top_k - 1) // costs.top_k
    return int(costs.gpu_ns[costs.layer_class[layer], tokens, experts])
