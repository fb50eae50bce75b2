"""Reads of a file past the page cache (O_DIRECT), into memory that is aligned for it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from oled.errors import UserError
from oled.live.store import page_aligned
from oled.types import Array

BLOCK_BYTES = 4096
"""Offsets, lengths and addresses are multiples of it; no disk in use asks for more."""

DEPTHS = (1, 2, 4, 8)
_TRIES = 4  # reads of each depth; the fastest counts

Identity = tuple[int, int, int, int]


def rounded_up(size: int) -> int:
    """Return the least multiple of `BLOCK_BYTES` that is not below `size` bytes."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class DirectReader:
    """A context that reads one file, each read in `depth` requests at a time.

    Every read checks that the path still leads to the file that was opened, unchanged.
    """

    def __init__(self, path: Path, depth: int) -> None:
        self.path = path.absolute()
        self.depth = depth
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            raise UserError(f"{path}: {_why_not_opened(error)}") from error
        self._opened = _identity(os.fstat(self._fd))
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="oled-read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True)
        os.close(self._fd)

    def read(self, offset: int, targets: Sequence[Array]) -> None:
        """Fill `targets`, u8 arrays of whole blocks that follow each other from `offset` on.

        The interpreter lock is free while the disk works. Raises UserError where the file was
        changed, replaced or cut short, or cannot be read.
        """
        self._check_unchanged()
        requests: list[tuple[int, Array]] = []
        for target in targets:
            share = rounded_up(-(-len(target) // self.depth))
            for begin in range(0, len(target), share):
                requests.append((offset + begin, target[begin : begin + share]))
            offset += len(target)
        *others, last = requests
        waiting = [self._pool.submit(self._fill, *request) for request in others]
        try:
            self._fill(*last)
        finally:
            errors = [job.exception() for job in waiting]  # nothing writes into targets any more
        for error in errors:
            if error is not None:
                raise error

    def _fill(self, offset: int, target: Array) -> None:
        view, done = memoryview(target.data), 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise UserError(f"{self.path}: byte {offset + done}: {error.strerror}") from error
            if count == 0:
                raise UserError(
                    f"{self.path}: the file ends at byte {offset + done}, {len(view) - done} bytes "
                    f"too early; make it again"
                )
            done += count

    def _check_unchanged(self) -> None:
        try:
            found: Identity | None = _identity(self.path.stat())
        except OSError:
            found = None
        if found != self._opened:
            how = "removed" if found is None else "changed or replaced"
            raise UserError(f"{self.path}: the file was {how} while the run read it; start again")


def measured_depth(path: Path, size: int, count: int, first: int = 0) -> int:
    """Return the fastest number of requests at a time for reads of `size` bytes.

    `count` such reads lie in the file one behind the other, from byte `first` on; they are read in
    turn, so that no read finds what an earlier one left in a disk's cache.
    """
    target = page_aligned(size)
    times: dict[int, int] = {}
    turn = 0
    for depth in DEPTHS:
        with DirectReader(path, depth) as reader:
            for _ in range(_TRIES):
                turn = (turn + 1) % count
                began = time.perf_counter_ns()
                reader.read(first + turn * size, [target])
                lasted = time.perf_counter_ns() - began
                times[depth] = min(times.get(depth, lasted), lasted)
    return min(times, key=lambda depth: times[depth])


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _why_not_opened(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "there is no such file"
    if error.errno == errno.EINVAL:
        return "this file system has no direct I/O (O_DIRECT); put the file on a disk"
    return str(error.strerror)
