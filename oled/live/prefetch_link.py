"""The prefetch link: from the policy's queue to the pieces that the link copies.

The link's thread asks while the main thread decides, so both hold `lock` when they touch what is
decided. A prefetched expert keeps its slot, under its name in the slot table, until the step that
it was prefetched for commits, or until it becomes a resident.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import Any

import numpy as np

from oled.live.backends import LayerWork, Piece
from oled.live.decider import Decider
from oled.live.slots import SlotPool
from oled.live.store import Store
from oled.policies.interface import COPYING, NOT_STAGED, Step


class PrefetchLink:
    """The `oled.live.backends.PrefetchFeed` of a run."""

    def __init__(self, decider: Decider, pool: SlotPool, store: Store) -> None:
        self.lock = threading.Lock()
        self.forward = 0  # the last one that began
        self._decider = decider
        self._pool = pool
        self._store = store
        self._work: LayerWork | None = None  # the step that runs
        self._granted: set[int] = set()  # slots that its copies on demand may use
        self._taken = 0  # slots that prefetches took since a step was decided, less those freed

    def next(self) -> Piece | None:
        with self.lock:
            ready, work = self._decider.ready, self._work
            if work is not None and work.transfers.size and not work.copied:
                return None  # the link's next job is the step's copies on demand
            room = ready.rules.staging - 1 - self.staged()
            if work is not None:
                room = min(room, work.spare + work.vacant.qsize())
            crossing = self._decider.take(room)
            if crossing is None:
                return None
            layer, expert, piece, pieces, work_ns = crossing
            if piece == 0:
                self._pool.table[layer, expert] = self._slot(work)
                self._taken += 1
            size = self._store.form.size
            return Piece(
                row=int(self._store.first[layer]) + expert,
                slot=int(self._pool.table[layer, expert]),
                first=size * piece // pieces,
                last=size * (piece + 1) // pieces,
                nominal_ns=work_ns,
                forward=self.forward,
                layer=layer,
            )

    def crossed(self, mark: Any) -> None:
        with self.lock:
            layer, expert = self._decider.crossing
            work, freed = self._work, self._decider.crossed()
            if freed is None:
                return
            self._taken -= freed
            if work is None or layer != work.layer:
                self._settle(layer)
            if work is None:
                return
            row = int(self._store.first[layer]) + expert
            for position in work.late[work.row[work.late] == row]:
                work.landed.put((mark, int(position)))
            for slot in self._pool.take(freed):  # 0 or 1: live experts have one size
                self._granted.add(slot)
                work.vacant.put((mark, slot))

    def decided(self) -> None:
        """A step has been decided and does not run yet. Call with `lock` held."""
        self._taken = 0

    def begin(self, step: Step, work: LayerWork, slots: int) -> None:
        """The step runs from now on; `slots` might be taken at once when it was decided. Call with
        `lock` held.

        What landed while the policy's time passed computes with the hits.
        """
        slots -= self._taken
        cache = self._decider.ready.cache
        waits = cache.staged[step.layer, step.expert[work.late]] == COPYING
        work.hits = np.sort(np.concatenate([work.hits, work.late[~waits]]))
        work.late = work.late[waits]
        work.free = self._pool.take(min(slots, work.transfers.size))
        work.spare = slots - len(work.free)
        self._granted = {*work.free, *work.released}
        self._work = work

    def end(self, step: Step, kept: Set[int]) -> None:
        """The step has run; its newcomers keep the slots `kept`. Call with `lock` held."""
        self._decider.finish(step)
        self._pool.give_back(sorted(self._granted - kept))
        self._settle(step.layer)
        self._work = None

    def _settle(self, layer: int) -> None:
        """Slots of experts that are neither resident nor staged fall free."""
        cache = self._decider.ready.cache
        here = (cache.resident[layer] != 0) | (cache.staged[layer] != NOT_STAGED)
        self._pool.keep(layer, here)

    def staged(self) -> int:
        """Return the number of staging slots that prefetches occupy."""
        return int(self._decider.ready.cache.staged_experts)

    def _slot(self, work: LayerWork | None) -> int:
        """A free slot; while a step runs, one that it has to spare or no longer wants."""
        if work is not None and work.spare == 0:
            _, slot = work.vacant.get_nowait()
            self._granted.remove(slot)
            return int(slot)
        if work is not None:
            work.spare -= 1
        return self._pool.take(1)[0]
