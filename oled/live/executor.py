"""One layer-step of a live run: decide, let the backend work, commit, sum up.

Letters as in `oled.live.kernels`: T tokens, k top-k, H hidden size, A active experts, P pairs.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.hardware import CostTables
from oled.live.backends import Backend, LayerWork
from oled.live.decider import Decider
from oled.live.kernels import group_pairs
from oled.live.prefetch_link import PrefetchLink
from oled.live.slots import SlotPool
from oled.live.store import Store
from oled.policies.composition import Composition
from oled.policies.decide import decides
from oled.policies.interface import (
    DROPPED,
    IN_FLIGHT,
    LANDED,
    ON_CPU,
    ON_GPU,
    RESIDENT,
    At,
    Side,
    Step,
)
from oled.running.hooks import Hooks
from oled.sim.lanes import LOG_POLICY, LOG_QUEUE, LOG_RESIDENTS
from oled.sim.prepare import Assembly
from oled.sim.settings import Settings
from oled.sim.slots import Budget


class Executor(Hooks):
    """A context: inside it experts move and compute; leaving it releases lanes and memory."""

    def __init__(self, store: Store, slots: int, decider: Decider, backend: Backend) -> None:
        self.store = store
        self.decider = decider
        self.backend = backend
        self.decide_ns: list[int] = []  # by forward: wall time of decisions, slots and job lists
        self.approximated: NDArray[np.uint16] = np.zeros(0, np.uint16)  # experts of the last step
        self._pool = SlotPool(slots, *decider.ready.cache.resident.shape)
        self._prefetch_link = PrefetchLink(decider, self._pool, store)

    def _install(self, installed: ExitStack) -> None:
        self.backend.open(self._prefetch_link if self.decider.prefetches else None)
        installed.callback(self.backend.close)

    def begin_request(self) -> None:
        """Initial residents are placed free of charge; everyone else leaves."""
        self.backend.drain()
        self.decider.begin_request()
        self._pool.clear()
        for layer, expert in np.argwhere(self.decider.ready.cache.resident):
            (slot,) = self._pool.take(1)
            self.backend.place(int(self.store.first[layer] + expert), slot)
            self._pool.commit(layer, expert, slot)
        self.backend.start()

    def begin_forward(self, at: At) -> None:
        began = time.perf_counter_ns()
        with self._prefetch_link.lock:
            self._prefetch_link.forward = at.forward
            gone = self.decider.begin_forward(at)
            self._pool.give_back([self._pool.evict(layer, expert) for layer, expert in gone])
        self.decide_ns.append(time.perf_counter_ns() - began)

    def run(self, step: Step, side: Side, ids: NDArray[np.int32], weight: Any, x: Any) -> Any:
        """Outputs [T, H] of one layer-step, as the backend has them; experts whose misses the
        policy approximates add nothing and are listed in `approximated`.

        ids i32[T, k] (other ids than the layer's experts are unused slots); weight [T, k] and
        x [T, H] as `Backend.adopt` gives them.
        """
        ready, backend = self.decider.ready, self.backend
        backend.settle()
        began = time.perf_counter_ns()
        with self._prefetch_link.lock:
            slots = self.decider.decide(step)
            work, more = self._work(step, ids, weight, x)
            self._prefetch_link.decided()
        self.decide_ns[-1] += time.perf_counter_ns() - began
        if decides(step, ready.rules):
            backend.host(LOG_POLICY, ready.costs.policy_ns, step.forward, step.layer)
        began = time.perf_counter_ns()
        with self._prefetch_link.lock:
            self.decider.ask(step, side)
            self._prefetch_link.begin(step, work, slots + more)
        self.decide_ns[-1] += time.perf_counter_ns() - began
        backend.wake()
        out = backend.run(work)
        with self._prefetch_link.lock:
            self._prefetch_link.end(step, self._commit(step, work))
        backend.wake()
        backend.note(LOG_RESIDENTS, step.forward, step.layer, int(ready.cache.used[step.layer]))
        waiting = int(ready.queue.end - ready.queue.begin)
        backend.note(LOG_QUEUE, step.forward, step.layer, waiting)
        return out

    def _work(
        self, step: Step, ids: NDArray[np.int32], weight: Any, x: Any
    ) -> tuple[LayerWork, int]:
        """Return the decision as work for the lanes, and how many slots are free beyond it."""
        plan, layer, options = self.decider.ready.plan, step.layer, self.decider.ready.options
        active = step.expert.size
        experts = step.expert.astype(np.int64)
        place, state = plan.place[:active], plan.state[:active]
        starts, pairs = self._pairs_of(ids, experts, place)
        on_device = self._pool.table[layer, experts]
        out = self._evicted_rows() if options.writes_back else []
        free, released = self._vacate(layer)
        self._pool.give_back(free)
        hits = np.flatnonzero((place == ON_GPU) & (state != IN_FLIGHT))
        more = 0
        if not hits.size:  # nothing computes in the slots of evicted active residents
            self._pool.give_back(released)
            more, released = len(released), []
        work = LayerWork(
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
            prefetched=self._prefetched(state),
            hits=hits,
            transfers=plan.order[: plan.transfers].copy(),
            late=np.flatnonzero((place == ON_GPU) & (state == IN_FLIGHT)),
            on_cpu=np.flatnonzero(place == ON_CPU),
            released=released,
            blocking=not options.overlap,
            out=out,
        )
        return work, more

    def _pairs_of(
        self, ids: NDArray[np.int32], experts: NDArray[np.int64], place: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `LayerWork.starts` and `pairs`; slots of approximated misses count as unused."""
        dropped, index = experts[place == DROPPED], self.decider.ready.plan.index
        self.approximated = dropped.astype(np.uint16)
        if dropped.size:
            index = index.copy()
            index[dropped] = -1
        starts, pairs = np.zeros(len(experts) + 1, np.int64), np.zeros(ids.size, np.int64)
        group_pairs(ids.reshape(-1), index, starts, pairs)
        return starts, pairs

    def _prefetched(self, state: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which of the active experts were prefetched and not used since."""
        found: NDArray[np.bool_] = state >= LANDED
        found[self.decider.ready.plan.index[self.decider.first_uses()]] = True
        return found

    def _evicted_rows(self) -> list[tuple[int, int]]:
        """(slot, row of the host store) of every resident that the decision took out."""
        return [
            (int(self._pool.table[layer, expert]), int(self.store.first[layer]) + expert)
            for layer, expert in self.decider.evicted()
        ]

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

    def _commit(self, step: Step, work: LayerWork) -> set[int]:
        """Newcomers on demand that stay keep their slots, which are returned, under their names."""
        kept: set[int] = set()
        for position in work.transfers[work.stays[work.transfers]]:
            slot = int(work.slot[position])
            self._pool.commit(step.layer, int(step.expert[position]), slot)
            kept.add(slot)
        return kept


def refuse_unsupported(composition: Composition, settings: Settings) -> None:
    """What cannot run live is refused by name, before anything is allocated."""
    if composition.reroute is not None:
        raise UserError(
            f"policy '{composition.name}' changes routes: its outputs are not the model's own. "
            f"Record a trace with it (oled record policy={composition.name}); that runs live"
        )
    if settings.unbounded:
        raise UserError(
            "cache.staging=unbounded is an accounting replay: a live run needs a number of slots"
        )


def refuse_giving_up(composition: Composition) -> None:
    """Of runs of a trace's routing, whose experts are random: nothing can stand in for them."""
    if composition.dispatch.drops:
        raise UserError(
            f"policy '{composition.name}' approximates misses, and random experts have nothing to "
            f"stand in for them: run a model under it (oled run model=tiny heads=bundled)"
        )


def device_slots(ready: Assembly, costs: CostTables, budget: Budget, staging: int) -> int:
    """Slots on the device: residents of all layers (or of the pool) and `staging`."""
    pooled = int(budget.total_bytes // costs.expert_bytes.min()) if ready.rules.pooled else 0
    return max(int(ready.start.capacity.sum()), pooled) + staging
