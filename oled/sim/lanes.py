"""The lanes of the machine and the copies on the link: state of the clock, in integer nanoseconds.

Lanes: GPU compute, H2D link, D2H link, CPU workers. One copy at a time is on the H2D link and it is
never pre-empted (a prefetch cut into chunks lets demand copies pass between two chunks). Work that
can be slowed down by the other lane is kept in millionths of a nanosecond, so that rates are whole
numbers and results do not depend on rounding.
"""

from __future__ import annotations

import numpy as np

from oled._jit import jitable, shared_njit
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
from oled.policies.struct import Matrix, Mutable, Struct, Vector

PPM = 1_000_000

# Lanes.link_what
IDLE, DEMAND, AHEAD = 0, 1, 2

# Lanes.busy
GPU, H2D, D2H, CPU = range(4)

# Lanes.stall
COPY_STALL, CPU_STALL, POLICY_STALL = range(3)

# Lanes.moved
MOVED, USEFUL, WASTED, LATE = range(4)

# Kinds of timeline entries.
LOG_HEAD, LOG_DENSE, LOG_HITS, LOG_LANDED, LOG_COPY, LOG_PREFETCH, LOG_CPU, LOG_OUT, LOG_POLICY = (
    range(9)
)
LOG_RESIDENTS, LOG_QUEUE, LOG_BACK, LOG_USE = 9, 10, 11, 12


class Ahead(Struct, mutable=True):
    """A copy made ahead, piece by piece."""

    layer: int
    expert: int
    kind: int  # HOLD or FILL
    due: int  # the layer-step that it is meant for
    chunks: int  # pieces that have not crossed; 0: no copy
    left_ns: int  # copying of the pieces that have not begun


class Lanes(Struct):
    """The state of the clock."""

    now: Mutable[int]
    link_what: Mutable[int]  # IDLE, DEMAND or AHEAD
    link_left: Mutable[int]  # work of the copy on the link, in millionths of a nanosecond
    link_began: Mutable[int]  # when that copy began
    link_ended: Mutable[int]  # when the link fell idle
    cpu_begin: Mutable[int]  # when the CPU's experts begin
    cpu_left: Mutable[int]  # their work, in millionths of a nanosecond; 0: none
    gpu_until: Mutable[int]  # when the running launch group ends
    copying: Ahead  # the prefetch on the link
    paused: Ahead  # one that waits between two chunks
    due: Matrix[np.int64]  # [L, E] the layer-step that a staged expert was fetched for
    busy: Vector[np.int64]  # [4] ns of work done by each lane
    stall: Vector[np.int64]  # [3] ns that the GPU stood still
    moved: Vector[np.int64]  # [4] bytes: host to device, prefetch useful, wasted, late
    log: Matrix[np.int64]  # [capacity, 6] kind, begin, end, forward, layer, item
    entries: Mutable[int]  # of the log
    recording: Mutable[bool]


def new_lanes(log_capacity: int, layers: int, experts: int) -> Lanes:
    """Return idle lanes with room for `log_capacity` timeline entries."""
    nothing = dict.fromkeys(Ahead.ref.fields, 0)
    return Lanes(
        now=0,
        link_what=IDLE,
        link_left=0,
        link_began=0,
        link_ended=-1,  # the first copy of a run finds the link asleep
        cpu_begin=0,
        cpu_left=0,
        gpu_until=0,
        copying=Ahead(**nothing),
        paused=Ahead(**nothing),
        due=np.zeros((layers, experts), np.int64),
        busy=np.zeros(4, np.int64),
        stall=np.zeros(3, np.int64),
        moved=np.zeros(4, np.int64),
        log=np.zeros((max(1, log_capacity), 6), np.int64),
        entries=0,
        recording=False,
    )


@shared_njit
def note(
    lanes: Lanes, kind: int, begin: int, end: int, forward: int, layer: int, item: int
) -> None:
    """Write one timeline entry, while recording is on and room is left."""
    n = lanes.entries
    if not lanes.recording or n >= lanes.log.shape[0]:
        return
    row = lanes.log[n]
    row[0], row[1], row[2], row[3], row[4], row[5] = kind, begin, end, forward, layer, item
    lanes.entries = n + 1


@jitable
def put_on_link(lanes: Lanes, what: int, work_ns: int, wake_ns: int) -> None:
    """Begin a copy now. A link that stood still needs `wake_ns` more (isolated copy latency)."""
    if lanes.link_ended < lanes.now:
        work_ns += wake_ns
    lanes.link_what, lanes.link_left, lanes.link_began = what, work_ns * PPM, lanes.now


@jitable
def both_read(lanes: Lanes) -> bool:
    """Whether link and CPU read host memory at this moment: each slows the other down."""
    return bool(lanes.link_what != IDLE and lanes.cpu_left > 0 and lanes.cpu_begin <= lanes.now)


@jitable
def pass_time(lanes: Lanes, until: int, link_rate: int, cpu_rate: int) -> None:
    """Let time pass to `until` at the present rates; no event lies in between."""
    elapsed = until - lanes.now
    if lanes.link_what != IDLE:
        lanes.link_left -= elapsed * link_rate
        lanes.busy[H2D] += elapsed
    if lanes.cpu_left > 0 and lanes.cpu_begin <= lanes.now:
        lanes.cpu_left -= elapsed * cpu_rate
        lanes.busy[CPU] += elapsed
    lanes.now = until


@jitable
def finish_time(now: int, left: int, rate: int) -> int:
    if rate == PPM:  # by far the most frequent, and a constant divides faster
        return now + (left + PPM - 1) // PPM
    return now + (left + rate - 1) // rate


@jitable
def take_prefetch(
    lanes: Lanes, queue: Queue, cache: Cache, costs: Costs, routed: int, room: int
) -> int:
    """Put the next prefetch on an idle link; returns the staging slots newly taken, -1 if none.

    A prefetch cut short goes on first. Entries whose expert is resident or on its way already, or
    whose layer-step is not later than `routed`, are dropped. `room`: staging slots it may take.
    """
    if lanes.paused.chunks > 0:
        _move(lanes.paused, lanes.copying)
        lanes.paused.chunks = 0
        _begin_chunk(lanes, costs)
        return 0
    while queue.begin < queue.end:
        head = queue.begin
        layer, expert = queue.layer[head], queue.expert[head]
        here = cache.staged[layer, expert] != NOT_STAGED or cache.resident[layer, expert] != 0
        if here or queue.due[head] <= routed:
            queue.begin += 1
            continue
        if room <= 0:
            return -1
        queue.begin += 1
        lanes.copying.layer, lanes.copying.expert = layer, expert
        lanes.copying.kind, lanes.copying.due = queue.kind[head], queue.due[head]
        lanes.copying.chunks = max(1, queue.chunks[head])
        lanes.copying.left_ns = costs.copy_ns[costs.layer_class[layer]]
        lanes.due[layer, expert] = queue.due[head]
        cache.staged[layer, expert] = COPYING
        cache.staged_experts += 1
        _begin_chunk(lanes, costs)
        return 1
    return -1


@jitable
def _move(source: Ahead, target: Ahead) -> None:
    target.layer, target.expert = source.layer, source.expert
    target.kind, target.due = source.kind, source.due
    target.chunks, target.left_ns = source.chunks, source.left_ns


@jitable
def _begin_chunk(lanes: Lanes, costs: Costs) -> None:
    """Put the next piece of `lanes.copying` on the link; the pieces add up to one whole copy."""
    piece = lanes.copying.left_ns // lanes.copying.chunks
    lanes.copying.left_ns -= piece
    put_on_link(lanes, AHEAD, piece, costs.copy_wake_ns)


@jitable
def end_chunk(lanes: Lanes, cache: Cache, forward: int) -> bool:
    """A prefetch (or a chunk of it) has crossed the link; True if the whole expert has landed."""
    layer, expert = lanes.copying.layer, lanes.copying.expert
    note(lanes, LOG_PREFETCH, lanes.link_began, lanes.now, forward, layer, expert)
    lanes.link_what, lanes.link_ended = IDLE, lanes.now
    lanes.copying.chunks -= 1
    if lanes.copying.chunks > 0:
        _move(lanes.copying, lanes.paused)
        return False
    cache.staged[layer, expert] = STAGED_FILL if lanes.copying.kind == FILL else STAGED
    lanes.moved[MOVED] += cache.expert_bytes[layer]
    return True


@jitable
def group_ns(costs: Costs, layer: int, assignments: int, experts: int) -> int:
    """GPU time of one launch group; `assignments` is the sum of its experts' token counts."""
    tokens = (assignments + costs.top_k - 1) // costs.top_k
    return int(costs.gpu_ns[costs.layer_class[layer], tokens, experts])
