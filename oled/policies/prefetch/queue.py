"""The prefetch queue: how parts write to it, and when a layer comes again.

`push` never writes outside the queue and may be called from a plain-Python prefetcher too.
"""

from __future__ import annotations

from oled._jit import jitable, shared_njit
from oled.policies.interface import NOT_STAGED, Cache, Queue, Side, Step


@shared_njit
def push(queue: Queue, layer: int, expert: int, kind: int, due: int, chunks: int) -> bool:
    """Append one copy; False if the queue is full even when moved to the front of its arrays."""
    room = queue.layer.size
    if queue.end == room and queue.begin > 0:
        first = queue.begin
        for j in range(room - first):
            queue.layer[j] = queue.layer[first + j]
            queue.expert[j] = queue.expert[first + j]
            queue.kind[j] = queue.kind[first + j]
            queue.due[j] = queue.due[first + j]
            queue.chunks[j] = queue.chunks[first + j]
        queue.begin, queue.end = 0, room - first
    end = queue.end
    if end == room:
        return False
    queue.layer[end], queue.expert[end], queue.kind[end] = layer, expert, kind
    queue.due[end], queue.chunks[end] = due, chunks
    queue.end = end + 1
    return True


@jitable
def clear(queue: Queue) -> None:
    """Forget what was asked for and has not begun."""
    queue.begin = queue.end = 0


@jitable
def is_wanted(cache: Cache, layer: int, expert: int) -> bool:
    """Whether a copy of the expert would bring anything: it is not on the GPU nor on its way."""
    return bool(cache.resident[layer, expert] == 0 and cache.staged[layer, expert] == NOT_STAGED)


@jitable
def step_ahead(side: Side, step: Step, layer: int) -> int:
    """The layer-step of a later `layer` in this forward, -1 if it does not come."""
    for index in range(step.index + 1, side.layer.size):
        if side.forward[index] != step.forward:
            return -1
        if side.layer[index] == layer:
            return index
    return -1


@jitable
def next_step(side: Side, step: Step) -> int:
    """This layer's next layer-step in the same request, -1 if there is none."""
    request = side.forward_request[step.forward]
    for index in range(step.index + 1, side.layer.size):
        if side.forward_request[side.forward[index]] != request:
            return -1
        if side.layer[index] == step.layer:
            return index
    return -1
