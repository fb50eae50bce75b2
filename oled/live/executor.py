"""One layer-step of a live run: decide, let the backend work, commit, sum up.

Letters as in `oled.live.kernels`: T tokens, k top-k, H hidden size, A active experts, P pairs.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from oled.live.backends import Backend, LayerWork
from oled.live.decider import Decider
from oled.live.kernels import Ints, group_pairs
from oled.live.slots import SlotPool
from oled.live.store import HostStore
from oled.policies.decide import decides
from oled.policies.interface import (
    N_TRANSFERS,
    ON_CPU,
    ON_GPU,
    RESIDENT,
    TRANSFER,
    At,
    Step,
)


class Executor:
    """A context: inside it experts move and compute; leaving it releases lanes and memory."""

    def __init__(self, store: HostStore, slots: int, decider: Decider, backend: Backend) -> None:
        layers, experts = decider.ready.cache.resident.shape
        self.store = store
        self.decider = decider
        self.backend = backend
        self.decide_ns = 0  # wall time of decisions, slot tables and job lists
        self._pool = SlotPool(slots, layers, experts)

    def __enter__(self) -> Self:
        self.backend.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.backend.close()

    def begin_request(self) -> None:
        """Initial residents are placed free of charge; everyone else leaves."""
        self.decider.begin_request()
        self._pool.clear()
        for layer, expert in np.argwhere(self.decider.ready.cache.resident):
            (slot,) = self._pool.take(1)
            self.backend.place(int(self.store.first[layer] + expert), slot)
            self._pool.commit(layer, expert, slot)

    def begin_forward(self, at: At) -> None:
        began = time.perf_counter_ns()
        gone = self.decider.begin_forward(at)
        self._pool.give_back([self._pool.evict(layer, expert) for layer, expert in gone])
        self.decide_ns += time.perf_counter_ns() - began

    def run(self, step: Step, ids: NDArray[np.int32], weight: Any, x: Any, host_ns: int = 0) -> Any:
        """Outputs [T, H] of one layer-step, as the backend has them.

        ids i32[T, k] (other ids than the layer's experts are unused slots); weight [T, k] and
        x [T, H] as `Backend.adopt` gives them. `host_ns`: nominal time of the dense part before
        it, where time is kept.
        """
        began = time.perf_counter_ns()
        ready = self.decider.ready
        slots = self.decider.decide(step)
        work = self._work(step, ids, weight, x, slots)
        self.decide_ns += time.perf_counter_ns() - began
        policy_ns = ready.costs.policy_ns if decides(step, ready.rules) else 0
        self.backend.host(host_ns + policy_ns)
        granted = [*work.free, *work.released]
        out = self.backend.run(work)
        self._commit(step, work, granted)
        return out

    def _work(
        self, step: Step, ids: NDArray[np.int32], weight: Any, x: Any, slots: int
    ) -> LayerWork:
        plan, pool, layer = self.decider.ready.plan, self._pool, step.layer
        active = step.expert.size
        experts = step.expert.astype(np.int64)
        place, state = plan.place[:active], plan.state[:active]
        on_device = pool.table[layer, experts]
        free, released = self._vacate(layer)
        pool.give_back(free)
        hits = np.flatnonzero(place == ON_GPU)
        transfers = plan.order[: plan.count[N_TRANSFERS]].copy()
        if not hits.size:  # nothing computes in the slots of evicted active residents
            pool.give_back(released)
            released = []
        on_cpu = np.flatnonzero(place == ON_CPU)
        if hits.size + transfers.size + on_cpu.size != active or (state[hits] != RESIDENT).any():
            raise RuntimeError("a plan with dropped or prefetched experts cannot be executed")
        at_once = min(slots, int((place == TRANSFER).sum())) if transfers.size else 0
        starts = np.zeros(active + 1, np.int64)
        pairs = np.zeros(ids.size, np.int64)
        group_pairs(ids.reshape(-1), plan.index, starts, pairs)
        return LayerWork(
            forward=step.forward,
            layer=layer,
            tokens=step.tokens,
            top_k=ids.shape[1],
            x=x,
            weight=weight.reshape(-1),
            starts=starts,
            pairs=pairs,
            count=step.count,
            row=self.store.first[layer] + experts,
            slot=on_device,
            stays=plan.stays[:active] != 0,
            hits=hits,
            transfers=transfers,
            on_cpu=on_cpu,
            free=pool.take(at_once),
            released=released,
        )

    def _vacate(self, layer: int) -> tuple[list[int], list[int]]:
        """Slots of evicted residents: free at once, and after the hits have computed."""
        plan = self.decider.ready.plan
        now: list[int] = []
        later: list[int] = []
        for other, expert in self.decider.evicted():
            slot = self._pool.evict(other, expert)
            position = plan.index[expert] if other == layer else -1
            waits = position >= 0 and plan.state[position] == RESIDENT
            (later if waits else now).append(slot)
        return now, later

    def _commit(self, step: Step, work: LayerWork, granted: list[int]) -> None:
        """Newcomers that stay keep their slots under their own names; all others are free."""
        kept: set[int] = set()
        for position in work.transfers:
            if work.stays[position]:
                slot = int(work.slot[position])
                self._pool.commit(step.layer, int(step.expert[position]), slot)
                kept.add(slot)
        self._pool.give_back([slot for slot in granted if slot not in kept])


def device_slots(capacity: Ints, total_bytes: int, expert_bytes: Ints, staging: int) -> int:
    """Slots on the device: residents of all layers (or of the pool) and staging."""
    return max(int(capacity.sum()), int(total_bytes // expert_bytes.min())) + staging
