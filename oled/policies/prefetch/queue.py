"""The prefetch queue: how parts write to it, and when a layer comes again.

`push` never writes outside the queue and may be called from a plain-Python prefetcher too.
"""

from __future__ import annotations

from oled._jit import bare_njit, inner_njit
from oled.policies.interface import NOT_STAGED, Cache, Queue, Side, Step


@bare_njit
def push(queue: Queue, layer: int, expert: int, kind: int, due: int, chunks: int) -> bool:
    """Append one copy; False if the queue is full even when moved to the front of its arrays."""
    room = queue.layer.size
    if queue.span[1] == room and queue.span[0] > 0:
        first = queue.span[0]
        for j in range(room - first):
            queue.layer[j] = queue.layer[first + j]
            queue.expert[j] = queue.expert[first + j]
            queue.kind[j] = queue.kind[first + j]
            queue.due[j] = queue.due[first + j]
            queue.chunks[j] = queue.chunks[first + j]
        queue.span[0], queue.span[1] = 0, room - first
    end = queue.span[1]
    if end == room:
        return False
    queue.layer[end], queue.expert[end], queue.kind[end] = layer, expert, kind
    queue.due[end], queue.chunks[end] = due, chunks
    queue.span[1] = end + 1
    return True


@inner_njit
def clear(queue: Queue) -> None:
    """Forget what was asked for and has not begun."""
    queue.span[0] = queue.span[1] = 0


@inner_njit
def is_wanted(cache: Cache, layer: int, expert: int) -> bool:
    """Whether a copy of the expert would bring anything: it is not on the GPU nor on its way."""
    return bool(cache.resident[layer, expert] == 0 and cache.staged[layer, expert] == NOT_STAGED)


@inner_njit
def step_ahead(side: Side, step: Step, layer: int) -> int:
    """The layer-step of a later `layer` in this forward, -1 if it does not come."""
    for index in range(step.index + 1, side.step_layer.size):
        if side.step_forward[index] != step.forward:
            return -1
        if side.step_layer[index] == layer:
            return index
    return -1


@inner_njit
def next_step(side: Side, step: Step) -> int:
    """This layer's next layer-step in the same request, -1 if there is none."""
    request = side.forward_request[step.forward]
    for index in range(step.index + 1, side.step_layer.size):
        if side.forward_request[side.step_forward[index]] != request:
            return -1
        if side.step_layer[index] == step.layer:
            return index
    return -1
