"""The layer-step of a blocking runtime: the main thread does one thing after the other."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np

from oled.live.backends import LayerWork
from oled.types import Ints

Mark = TypeVar("Mark")


class SerialDevice(Protocol[Mark]):
    """The calls of `oled.live.backends.lanes.Lanes` that a serial layer-step makes."""

    def copy(self, work: LayerWork, position: int, slot: int, vacant: Mark) -> Mark: ...

    def copy_back(self, work: LayerWork, slot: int, row: int, cause: Mark) -> Mark: ...

    def wait(self, mark: Mark) -> None: ...

    def turn(self, cause: Mark) -> Mark: ...

    def group(self, work: LayerWork, chosen: Ints, turn: Mark, *, hits: bool) -> Mark: ...

    def compute_on_host(self, work: LayerWork, cause: Mark) -> Mark: ...


def run_serially(device: SerialDevice[Mark], work: LayerWork) -> Mark:
    """Run the step, wait for each part before the next one begins, and return the last mark."""

    def waited(mark: Mark) -> Mark:
        device.wait(mark)
        return mark

    mark: Mark = work.begin
    for slot, row in work.out:
        mark = waited(device.copy_back(work, slot, row, mark))
    chosen, free, released = work.hits.tolist(), list(work.free), list(work.released)
    coming, first = work.transfers.tolist(), True
    while True:
        while coming and free:
            position, slot = coming.pop(0), free.pop(0)
            mark = waited(device.copy(work, position, slot, mark))
            work.slot[position] = slot
            chosen.append(position)
            if not work.stays[position]:
                released.append(slot)
        if chosen:
            turn = device.turn(mark)
            mark = waited(device.group(work, np.array(chosen), turn, hits=first))
        if not coming:
            break
        if not released:
            raise RuntimeError("a transfer waits for a slot that never becomes free")
        chosen, free, released, first = [], released, [], False
    if work.on_cpu.size:
        mark = waited(device.compute_on_host(work, mark))
    return mark
