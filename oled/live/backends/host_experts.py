"""The host's experts as lanes of threads use them: in memory, or in a file read directly.

Whatever the source, a slot's first number is NaN from the start of a copy until its landing: a lane
that computes without waiting gets NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from oled.live.direct_io import BLOCK_BYTES, DirectReader, rounded_up
from oled.live.expert_file import ExpertFile
from oled.live.kernels import copy_poisoned
from oled.live.store import HostStore, page_aligned
from oled.types import Floats, Ints

_NUMBER = np.dtype(np.float32).itemsize


class HostExperts(Protocol):
    """Where copies come from and where the CPU lane computes. S numbers of an expert, f32."""

    slot_numbers: int  # of a slot, at least S

    def open(self, slots: int) -> None:
        """Allocate what copies into that many slots need."""

    def close(self) -> None:
        """Give all of it back."""

    def copy(self, row: int, slot: int, target: Floats, first: int, last: int) -> None:
        """Copy numbers `first` to `last` of a row into `target`, the memory of `slot`.

        Pieces of a row come in order. The interpreter lock is free meanwhile.
        """

    def land(self, row: int, slot: int, target: Floats) -> None:
        """End the copy of a row: from now on its slot may be computed with."""

    def copy_back(self, row: int, source: Floats) -> None:
        """Copy a slot back to its row."""

    def batches(self, row: Ints, chosen: Ints) -> Iterator[tuple[Floats, Ints, Ints]]:
        """Yield (block, row of each position, positions) to compute with, for all of `chosen`.

        row i64[A]: row of each position. A block is valid until the next one.
        """


class InMemory:
    """The experts of a `HostStore`, which the CPU lane computes with in place."""

    def __init__(self, store: HostStore) -> None:
        self.slot_numbers = store.form.size
        self._block = store.block

    def open(self, slots: int) -> None:
        pass

    def close(self) -> None:
        pass

    def copy(self, row: int, slot: int, target: Floats, first: int, last: int) -> None:
        copy_poisoned(self._block[row, :last], target[:last], first)

    def land(self, row: int, slot: int, target: Floats) -> None:
        target[0] = self._block[row, 0]

    def copy_back(self, row: int, source: Floats) -> None:
        self._block[row] = source

    def batches(self, row: Ints, chosen: Ints) -> Iterator[tuple[Floats, Ints, Ints]]:
        yield self._block, row, chosen


class OnDisk:
    """The experts of an `ExpertFile`. The CPU lane reads each of its experts before it computes."""

    def __init__(self, file: ExpertFile, depth: int) -> None:
        self.slot_numbers = file.row_bytes // _NUMBER
        self._file = file
        self._depth = depth
        self._first_blocks = page_aligned(0)  # [slots, BLOCK_BYTES] of copies that have not landed
        self._on_cpu = page_aligned(0)  # the row that the CPU lane computes with
        self._undo = ExitStack()

    def open(self, slots: int) -> None:
        self._reader = self._undo.enter_context(DirectReader(self._file.path, self._depth))
        self._first_blocks = page_aligned(slots * BLOCK_BYTES).reshape(slots, BLOCK_BYTES)
        self._on_cpu = page_aligned(self._file.row_bytes)

    def close(self) -> None:
        self._undo.close()
        self._first_blocks, self._on_cpu = page_aligned(0), page_aligned(0)

    def copy(self, row: int, slot: int, target: Floats, first: int, last: int) -> None:
        """Read the blocks that begin in a piece; the row's first block waits for the landing."""
        ends = last == self._file.form.size
        begin = rounded_up(first * _NUMBER)
        end = self._file.row_bytes if ends else rounded_up(last * _NUMBER)
        into = target.view(np.uint8)
        parts = [into[begin:end]]
        if begin == 0:
            target[0] = np.nan
            parts = [self._first_blocks[slot], into[BLOCK_BYTES:end]]
        parts = [part for part in parts if len(part)]
        if parts:
            self._reader.read(self._file.offset(row) + begin, parts)

    def land(self, row: int, slot: int, target: Floats) -> None:
        target[: BLOCK_BYTES // _NUMBER] = self._first_blocks[slot].view(np.float32)

    def copy_back(self, row: int, source: Floats) -> None:
        raise RuntimeError(f"{self._file.path} is only read: see `Kind.refuse`")

    def batches(self, row: Ints, chosen: Ints) -> Iterator[tuple[Floats, Ints, Ints]]:
        block = self._on_cpu.view(np.float32).reshape(1, -1)
        here = np.zeros_like(row)
        for position in chosen:
            self._reader.read(self._file.offset(int(row[position])), [self._on_cpu])
            yield block, here, np.array([position])
