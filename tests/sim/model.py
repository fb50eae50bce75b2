"""The simulator a second time, from DESIGN §4 and §5: dicts, sorted lists, SimPy processes.

Nothing of the engine is used, not even its constants. What DESIGN leaves open is decided as the
engine documents it:

- work that ends at an instant ends before other work begins at it; of what begins, copies on demand
  come before prefetches;
- a copy pays the wake-up latency where the link stood still for at least a nanosecond;
- what a policy decides begins when its time is over, prefetches behind the copies on demand;
- prefetches leave one staging slot free, and none begins while the layer has copies to begin;
- a prefetched expert that is active counts as a hit if it has landed, as late if it is on its way;
  what has landed when the policy's time is over computes with the hits, whatever it counts as;
- an evicted active expert frees its slot when the hits have computed (at once where none are).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import simpy

from .model_cache import FILL, Active, Case, Key, Residents, Staged

PPM = 1_000_000
SUMS = ("moved", "useful", "wasted", "late", "h2d", "cpu", "gpu", "copy stall", "cpu stall")
ENDS, GRANTS, GROUPS, IDLE_LINK = 10, 11, 12, 13  # order within an instant, after plain events


@dataclasses.dataclass
class Asked:
    layer: int
    expert: int
    kind: int
    due: int
    work: int  # ns of copying left
    pieces: int
    begun: bool = False


class Model(Residents):
    """One replay; afterwards `log`, `ends`, `decisions` and `sums` tell what happened."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.env = simpy.Environment()
        self.link = simpy.PriorityResource(self.env)
        self.log: list[tuple[Any, ...]] = []
        self.ends: list[int] = []
        self.decisions: list[tuple[str, str, int]] = []  # state, place, stays; by entry
        self.sums = dict.fromkeys(SUMS, 0)
        self.link_free_since = -1  # the first copy of a run finds the link asleep
        self.on_memory: set[str] = set()  # who reads host memory now
        self.memory_changed = self.env.event()
        self.poked = self.env.event()
        self.routed = -1
        self.busy: int | None = None
        self.unbegun = 0  # copies on demand that have not begun
        self.slots: simpy.Container | None = None  # while a layer executes
        self.owed = 0  # slots of the step that a large FILL has taken and that were not free
        self.in_flight: dict[Key, simpy.Event] = {}
        self.forget()
        self.fetcher = self.env.process(self.prefetcher())
        self.env.run(self.env.process(self.run()))

    def forget(self) -> None:
        super().forget()
        self.ahead: list[Asked] = []

    # ---- time

    def level(self, priority: int) -> simpy.Event:
        """Later in this same instant: after everything of a lower priority."""
        event = simpy.Event(self.env)
        event._ok, event._value = True, None
        self.env.schedule(event, priority=priority)  # type: ignore[arg-type]
        return event

    def poke(self) -> None:
        """Something changed that a waiting prefetch may be waiting for."""
        self.poked.succeed()
        self.poked = self.env.event()

    def read_memory(self, who: str, work_ns: int) -> Generator[simpy.Event, Any, None]:
        """Copy or compute from host memory: slower while the other does too."""
        left = work_ns * PPM
        self._memory(self.on_memory | {who})
        try:
            while left > 0:
                costs = self.case.costs
                beside = costs.link_contention_ppm if who == "link" else costs.cpu_contention_ppm
                rate = beside if len(self.on_memory) == 2 else PPM
                began = self.env.now
                yield self.env.timeout(-(-left // rate)) | self.memory_changed
                left -= (self.env.now - began) * rate
        finally:
            self._memory(self.on_memory - {who})

    def _memory(self, users: set[str]) -> None:
        self.on_memory = users
        changed, self.memory_changed = self.memory_changed, self.env.event()
        changed.succeed()

    def cross(self, work: int) -> Generator[simpy.Event, Any, None]:
        """One copy on the link, which the caller holds."""
        if self.link_free_since < self.env.now:
            work += self.case.costs.copy_wake_ns
        began = self.env.now
        try:
            yield from self.read_memory("link", work)
        finally:
            self.link_free_since = self.env.now
            self.sums["h2d"] += self.env.now - began

    # ---- the run

    def run(self) -> Generator[simpy.Event, Any, None]:
        case, costs = self.case, self.case.costs
        index = -1
        for forward, (steps, request) in enumerate(zip(case.forwards, case.requests, strict=True)):
            new = forward > 0 and request != case.requests[forward - 1]
            if new and not case.persistent:
                yield from self.drain()
            for step in steps:
                index += 1
                yield from self.alone(int(costs.dense_ns[forward]), ("dense", forward, step.layer))
                yield from self.layer_step(index, step)
            yield from self.alone(int(costs.head_ns[forward]), ("head", forward, -1))
            self.ends.append(self.env.now)
        yield from self.drain()

    def alone(self, duration: int, what: tuple[str, int, int]) -> Generator[simpy.Event, Any, None]:
        """The GPU works and no experts do."""
        began = self.env.now
        self.poke()
        yield self.env.timeout(duration)
        yield self.level(ENDS)
        self.sums["gpu"] += duration
        self.note(what[0], began, what[1], what[2], None)

    def note(self, kind: str, began: int, forward: int, layer: int, item: int | None) -> None:
        self.log.append((kind, began, self.env.now, forward, layer, item))

    def drain(self) -> Generator[simpy.Event, Any, None]:
        """A request is over: what was fetched ahead and never used was fetched in vain.

        A copy on its way is abandoned and counts as made.
        """
        for layer, _ in self.unused:
            self.sums["wasted"] += self.case.sizes[layer]
        for (layer, _), staged in self.staged.items():
            self.sums["wasted"] += self.case.sizes[layer]
            self.sums["moved"] += 0 if staged.landed else self.case.sizes[layer]
        self.forget()
        self.fetcher.interrupt()
        yield self.level(ENDS)
        self.fetcher = self.env.process(self.prefetcher())

    # ---- one layer-step

    def layer_step(self, index: int, step: Active) -> Generator[simpy.Event, Any, None]:
        case, costs, layer = self.case, self.case.costs, step.layer
        self.routed, self.busy = index, layer
        residents_before = len(self.resident[layer])
        bytes_before = self.bytes()
        states = {e: self.find(layer, e) for e in step.counts}
        places = {}
        for e, state in states.items():
            if state == "absent":
                places[e] = "cpu" if (index, e) in case.on_cpu else "transfer"
            else:
                places[e] = "cpu" if (index, e) in case.residents_on_cpu else "gpu"
        before = {e: self.value((layer, e)) for e in range(case.experts[layer])}
        self.learn(index, step)
        if case.admission == "sequential":
            stays, evicted = self.one_by_one(step, states, places, before)
        else:
            stays, evicted = self.admit(step, states, places)
        for e in sorted(step.counts):
            self.decisions.append((states[e], places[e], int(e in stays)))
        self.book(step, states, places, evicted)

        self.pool_taken = 0
        if costs.policy_ns:
            began = self.env.now
            self.poke()
            yield self.env.timeout(costs.policy_ns)
            yield self.level(ENDS)
            self.note("policy", began, step.forward, layer, None)
        self.ask(index)

        own = [e for la, e in evicted if la == layer and states.get(e) == "resident"]
        if case.capacity is not None:
            room = case.capacity[layer] - residents_before + len(evicted) - len(own)
        else:
            freed = sum(case.sizes[la] for la, _ in evicted)
            room = (case.budget - bytes_before + freed) // case.sizes[layer] - len(own)
        at_once = room + case.staging - len(self.staged) - self.pool_taken
        self.slots = simpy.Container(self.env, init=max(0, at_once))
        self.owed = max(0, -at_once)
        yield from self.execute(step, states, places, stays, len(own))
        self.slots = None
        self.commit(index, step, states, places)
        self.busy = None

    def ask(self, index: int) -> None:
        """The policy's time is over: its prefetches queue behind its copies on demand."""
        case, costs = self.case, self.case.costs
        if index in case.anew:
            self.ahead = [a for a in self.ahead if a.begun]
        for ask in case.asks.get(index, ()):
            work = int(costs.copy_ns[costs.layer_class[ask.layer]])
            self.ahead.append(Asked(ask.layer, ask.expert, ask.kind, ask.due, work, ask.chunks))

    def execute(
        self,
        step: Active,
        states: dict[int, str],
        places: dict[int, str],
        stays: set[int],
        held: int,
    ) -> Generator[simpy.Event, Any, None]:
        layer = step.layer
        on_gpu = [e for e in sorted(step.counts) if places[e] == "gpu"]
        late = [e for e in on_gpu if states[e] == "in flight" and (layer, e) in self.in_flight]
        first = [e for e in on_gpu if e not in late]
        cpu = [e for e in step.counts if places[e] == "cpu"]
        ranked = sorted(
            (e for e in step.counts if places[e] == "transfer"),
            key=lambda e: (e in stays, self.rank(step, e), e),
        )
        work = []
        self.ready: list[tuple[int, bool]] = []
        self.landed = self.env.event()
        self.unbegun = len(ranked)
        self.to_come = {(layer, e) for e in stays & set(ranked)}
        self.passing = held
        for e in ranked:
            work.append(self.env.process(self.on_demand(step, e, e not in stays)))
        for e in late:
            work.append(self.env.process(self.await_late(layer, e)))
        work.append(self.env.process(self.gpu(step, first, held, len(ranked) + len(late))))
        if cpu:
            work.append(self.env.process(self.cpu(step, cpu)))
        self.poke()
        yield self.env.all_of(work)
        self.sums["cpu stall"] += self.env.now - self.gpu_done
        yield self.level(ENDS)

    def rank(self, step: Active, expert: int) -> float:
        if self.case.admission != "sequential":
            return self.case.ranks.get((self.routed, expert), 0.0)
        return step.order.index(expert) if self.case.by_mention else expert

    def on_demand(
        self, step: Active, expert: int, leaves: bool
    ) -> Generator[simpy.Event, Any, None]:
        yield self.slots.get(1)
        with self.link.request(priority=0) as turn:
            yield turn
            self.unbegun -= 1
            self.to_come.discard((step.layer, expert))
            self.passing += leaves
            self.check_room(step.layer)
            began = self.env.now
            cls = self.case.costs.layer_class[step.layer]
            yield from self.cross(int(self.case.costs.copy_ns[cls]))
            self.note("copy", began, step.forward, step.layer, expert)
            self.sums["moved"] += self.case.sizes[step.layer]
            self.land(expert, leaves)
            yield self.level(GRANTS)  # whoever gets a slot at this instant queues before we let go
        self.poke()

    def await_late(self, layer: int, expert: int) -> Generator[simpy.Event, Any, None]:
        yield self.in_flight[layer, expert]
        self.land(expert, False)

    def land(self, expert: int, leaves: bool) -> None:
        self.ready.append((expert, leaves))
        self.landed.succeed()
        self.landed = self.env.event()

    def gpu(
        self, step: Active, first: list[int], held: int, awaited: int
    ) -> Generator[simpy.Event, Any, None]:
        if first:
            yield from self.group(step, "hits", first)
        self.leave(held)
        while awaited:
            if not self.ready:
                idle_since = self.env.now
                yield self.landed
                self.sums["copy stall"] += self.env.now - idle_since
            yield self.level(GROUPS)
            together, self.ready = self.ready, []
            awaited -= len(together)
            yield from self.group(step, "landed", [e for e, _ in together])
            self.leave(sum(leaves for _, leaves in together))
        self.gpu_done = self.env.now

    def group(
        self, step: Active, what: str, experts: list[int]
    ) -> Generator[simpy.Event, Any, None]:
        costs, began = self.case.costs, self.env.now
        assignments = sum(step.counts[e] for e in experts)
        tokens = -(-assignments // self.case.top_k)
        duration = int(costs.gpu_ns[costs.layer_class[step.layer], tokens, len(experts)])
        yield self.env.timeout(duration)
        self.sums["gpu"] += duration
        self.note(what, began, step.forward, step.layer, len(experts))

    def leave(self, experts: int) -> None:
        """So many experts that do not stay have computed."""
        self.passing -= experts
        self.give(experts)

    def give(self, slots: int) -> None:
        """Slots fall free; those that are owed to the pool go there first."""
        paid = min(slots, self.owed)
        self.owed -= paid
        if slots > paid:
            self.slots.put(slots - paid)
            self.poke()

    def take_from_step(self, slots: int) -> None:
        """The step has so many slots less: those that nobody holds, then those that fall free."""
        free = min(slots, self.slots.level)
        if free:
            self.slots.get(free)
        self.owed += slots - free

    def cpu(self, step: Active, experts: list[int]) -> Generator[simpy.Event, Any, None]:
        costs = self.case.costs
        tokens = min(sum(step.counts[e] for e in experts), step.tokens)
        cls = costs.layer_class[step.layer]
        work = costs.cpu_call_ns + sum(int(costs.cpu_ns[cls, step.counts[e]]) for e in experts)
        began = self.env.now
        yield self.env.timeout(int(costs.act_out_ns[tokens]))
        self.note("out", began, step.forward, step.layer, tokens)
        began = self.env.now
        yield from self.read_memory("cpu", work)
        self.sums["cpu"] += self.env.now - began
        self.note("cpu", began, step.forward, step.layer, len(experts))
        yield self.env.timeout(int(costs.act_back_ns[tokens]))

    # ---- prefetches

    def prefetcher(self) -> Generator[simpy.Event, Any, None]:
        with contextlib.suppress(simpy.Interrupt):
            yield from self.fetch_ahead()

    def fetch_ahead(self) -> Generator[simpy.Event, Any, None]:
        while True:
            yield self.level(IDLE_LINK)
            if self.next_ahead() is None:
                yield self.poked
                continue
            with self.link.request(priority=1) as turn:
                yield turn
                asked = self.next_ahead()  # much may have happened while we queued
                if asked is not None:
                    yield from self.fetch(asked)
                    yield self.level(GRANTS)

    def next_ahead(self) -> Asked | None:
        """The prefetch to begin or go on with; what has become pointless is dropped on the way."""
        if self.unbegun:
            return None
        while self.ahead:
            asked = self.ahead[0]
            key = (asked.layer, asked.expert)
            if asked.begun:
                return asked
            here = key in self.staged or asked.expert in self.resident[asked.layer]
            if here or asked.due <= self.routed:
                self.ahead.pop(0)
                continue
            room = self.case.staging - 1 - len(self.staged)
            if self.slots is not None:
                room = min(room, self.slots.level)
            return asked if room > 0 else None
        return None

    def fetch(self, asked: Asked) -> Generator[simpy.Event, Any, None]:
        key = (asked.layer, asked.expert)
        if not asked.begun:
            asked.begun = True
            self.staged[key] = Staged(asked.kind, asked.due)
            self.in_flight[key] = self.env.event()
            if self.slots is not None:
                yield self.slots.get(1)
            if self.busy is not None:
                self.check_room(self.busy)
        piece = asked.work // asked.pieces
        asked.work -= piece
        asked.pieces -= 1
        began = self.env.now
        yield from self.cross(piece)
        self.note("prefetch", began, -1, asked.layer, asked.expert)
        if asked.pieces:
            return
        self.ahead.remove(asked)
        self.staged[key].landed = True
        self.sums["moved"] += self.case.sizes[asked.layer]
        self.in_flight.pop(key).succeed()
        if asked.layer == self.busy:
            return
        if asked.kind == FILL:
            self.join(key)
        elif asked.due <= self.routed:
            self.waste(key)

    def release_staging(self, layer: int) -> None:
        if self.slots is not None and self.busy != layer:
            self.give(1)

    def pool_shrank(self, before: int) -> None:
        if self.busy is None:
            return
        size = self.case.sizes[self.busy]
        lost = before // size - (self.case.budget - self.bytes()) // size
        if self.slots is None:
            self.pool_taken += lost
        else:
            self.give(1)
            self.take_from_step(lost)
