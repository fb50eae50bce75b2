"""Slots on the device: which expert lies in which, and which are free.

A slot is a number. Resident and staging slots are the same thing: a copy lands in any free one, and
a commit only re-labels it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SlotPool:
    """`table` i64[L, E]: the slot of an expert that is on the device, or on its way there ahead of
    its layer; -1 where it is not.
    """

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        self.table: NDArray[np.int64] = np.full((layers, experts), -1, np.int64)
        self.free = list(range(slots - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """`count` free slots."""
        if count > len(self.free):
            raise RuntimeError(f"{count} slots were granted, {len(self.free)} are free")
        return [self.free.pop() for _ in range(count)]

    def give_back(self, slots: Sequence[int]) -> None:
        self.free.extend(slots)

    def commit(self, layer: int, expert: int, slot: int) -> None:
        """The expert that landed in `slot` is a resident from now on."""
        self.table[layer, expert] = slot

    def evict(self, layer: int, expert: int) -> int:
        """The expert has lost its slot, which is returned and not free yet."""
        slot = int(self.table[layer, expert])
        if slot < 0:
            raise RuntimeError(f"expert {expert} of layer {layer} was evicted and has no slot")
        self.table[layer, expert] = -1
        return slot

    def keep(self, layer: int, here: NDArray[np.bool_]) -> None:
        """Of `layer`, only the experts `here` bool[E] keep their slots."""
        gone = (self.table[layer] >= 0) & ~here
        self.give_back(self.table[layer, gone].tolist())
        self.table[layer, gone] = -1

    def clear(self) -> None:
        """No expert is on the device."""
        self.free.extend(int(slot) for slot in self.table[self.table >= 0])
        self.table[:] = -1
