"""The simulator a second time, from DESIGN §4 and §5: dicts, sorted lists, SimPy processes.

Nothing of the engine is used, not even its constants. What DESIGN leaves open is decided as the
engine documents it:

- work that ends at an instant ends before other work begins at it; of what begins, copies on demand
  come before prefetches;
- a copy pays the wake-up latency where the link stood still for at least a nanosecond;
- prefetches leave one staging slot free, and none begins while the layer has copies to begin;
- a prefetched expert that is active counts as a hit if it has landed, as late if it is on its way;
  what has landed when the policy's time is over computes with the hits, whatever it counts as;
- an evicted active expert frees its slot when the hits have computed (at once where none are).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterable
from typing import Any

import simpy

PPM = 1_000_000
HOLD, FILL = 0, 1
ENDS, GRANTS, GROUPS, IDLE_LINK = 10, 11, 12, 13  # order within an instant, after plain events


@dataclasses.dataclass(frozen=True)
class Active:
    """A layer-step's routing."""

    forward: int
    layer: int
    tokens: int
    counts: dict[int, int]  # expert -> tokens
    order: tuple[int, ...]  # experts by last mention


@dataclasses.dataclass(frozen=True)
class Case:
    """A replay: routing, machine, cache, and what the policy says."""

    forwards: list[list[Active]]
    requests: list[int]
    experts: list[int]  # of each layer
    sizes: list[int]
    top_k: int
    costs: Any  # the look-up tables
    admission: str  # demand | compete | frozen | sequential
    by_mention: bool  # sequential: in the order of mention, not of ids
    rule: str  # lru | lfu
    capacity: list[int] | None  # slots of each layer, or
    budget: int | None  # bytes of all
    staging: int
    persistent: bool
    on_cpu: frozenset[tuple[int, int]]
    residents_on_cpu: frozenset[tuple[int, int]]
    ranks: dict[tuple[int, int], float]
    asks: dict[int, list[Any]]  # step -> prefetches asked for
    anew: frozenset[int]


@dataclasses.dataclass
class Staged:
    """A prefetched expert, on its way or landed."""

    kind: int
    due: int
    landed: bool = False


@dataclasses.dataclass
class Asked:
    layer: int
    expert: int
    kind: int
    due: int
    work: int  # ns of copying left
    pieces: int
    begun: bool = False


class Model:
    """One replay; afterwards `log`, `ends`, `decisions` and `sums` tell what happened."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.env = simpy.Environment()
        self.link = simpy.PriorityResource(self.env)
        self.log: list[tuple[Any, ...]] = []
        self.ends: list[int] = []
        self.decisions: list[tuple[str, str, int]] = []  # state, place, stays; by entry
        names = (
            "moved",
            "useful",
            "wasted",
            "late",
            "h2d",
            "cpu",
            "gpu",
            "copy stall",
            "cpu stall",
        )
        self.sums = dict.fromkeys(names, 0)
        self.ahead: list[Asked] = []
        self.link_free_since = -1  # the first copy of a run finds the link asleep
        self.on_memory: set[str] = set()  # who reads host memory now
        self.memory_changed = self.env.event()
        self.poked = self.env.event()
        self.routed = -1
        self.busy: int | None = None
        self.unbegun = 0  # copies on demand that have not begun
        self.slots: simpy.Container | None = None  # while a layer executes
        self.in_flight: dict[tuple[int, int], simpy.Event] = {}
        self.forget()
        self.fetcher = self.env.process(self.prefetcher())
        self.env.run(self.env.process(self.run()))

    def forget(self) -> None:
        layers = range(len(self.case.experts))
        self.resident: list[set[int]] = [set() for _ in layers]
        self.score: dict[tuple[int, int], float] = {}
        self.age = {(la, e): -1 - e for la in layers for e in range(self.case.experts[la])}
        self.staged: dict[tuple[int, int], Staged] = {}
        self.unused: set[tuple[int, int]] = set()  # residents fetched ahead and not used since
        self.ahead = []

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
                rate = self.case.costs.contention_ppm if len(self.on_memory) == 2 else PPM
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

        if index in case.anew:
            self.ahead = [a for a in self.ahead if a.begun]
        for ask in case.asks.get(index, ()):
            work = int(costs.copy_ns[costs.layer_class[ask.layer]])
            self.ahead.append(Asked(ask.layer, ask.expert, ask.kind, ask.due, work, ask.chunks))
        if costs.policy_ns:
            began = self.env.now
            self.poke()
            yield self.env.timeout(costs.policy_ns)
            yield self.level(ENDS)
            self.note("policy", began, step.forward, layer, None)

        own = [e for la, e in evicted if la == layer and states.get(e) == "resident"]
        if case.capacity is not None:
            room = case.capacity[layer] - residents_before + len(evicted) - len(own)
        else:
            freed = sum(case.sizes[la] for la, _ in evicted)
            room = (case.budget - bytes_before + freed) // case.sizes[layer] - len(own)
        at_once = room + case.staging - len(self.staged)
        self.slots = simpy.Container(self.env, init=at_once)
        yield from self.execute(step, states, places, stays, len(own))
        self.slots = None
        self.commit(index, step, states, places)
        self.busy = None

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
        self.give(held)
        while awaited:
            if not self.ready:
                idle_since = self.env.now
                yield self.landed
                self.sums["copy stall"] += self.env.now - idle_since
            yield self.level(GROUPS)
            together, self.ready = self.ready, []
            awaited -= len(together)
            yield from self.group(step, "landed", [e for e, _ in together])
            self.give(sum(leaves for _, leaves in together))
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

    def give(self, slots: int) -> None:
        if slots:
            self.slots.put(slots)
            self.poke()

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

    def unstage(self, key: tuple[int, int]) -> None:
        del self.staged[key]
        if self.slots is not None and self.busy != key[0]:
            self.give(1)

    def waste(self, key: tuple[int, int]) -> None:
        self.unstage(key)
        self.sums["wasted"] += self.case.sizes[key[0]]

    def join(self, key: tuple[int, int]) -> None:
        """A FILL becomes resident in place of the lowest of its layer, if it stands above it."""
        layer, expert = key
        if self.case.capacity is not None:
            full = len(self.resident[layer]) >= self.case.capacity[layer]
        else:
            full = self.bytes() + self.case.sizes[layer] > self.case.budget
        if full:
            standing = [(layer, e) for e in self.resident[layer]]
            lowest = min(standing, key=self.value, default=None)
            if lowest is None or self.value(lowest) >= self.value(key):
                self.waste(key)
                return
            self.resident[layer].discard(lowest[1])
            self.book_leaving(lowest)
        self.unstage(key)
        self.resident[layer].add(expert)
        self.unused.add(key)

    # ---- the cache

    def bytes(self) -> int:
        return sum(len(r) * s for r, s in zip(self.resident, self.case.sizes, strict=True))

    def value(self, key: tuple[int, int]) -> tuple[float, Any]:
        return (self.score.get(key, 0.0), self.age[key])

    def find(self, layer: int, expert: int) -> str:
        if expert in self.resident[layer]:
            return "resident"
        staged = self.staged.get((layer, expert))
        return "absent" if staged is None else "landed" if staged.landed else "in flight"

    def learn(self, index: int, step: Active) -> None:
        for turn, e in enumerate(step.order):
            self.age[step.layer, e] = (index + 1) * 10**6 + turn
            if self.case.rule == "lfu":
                self.score[step.layer, e] = self.score.get((step.layer, e), 0.0) + 1.0

    def admit(
        self, step: Active, states: dict[int, str], places: dict[int, str]
    ) -> tuple[set[int], list[tuple[int, int]]]:
        """Who of the newcomers stays, and which residents leave."""
        case, layer = self.case, step.layer
        if case.admission == "frozen":
            return set(), []
        new = {e for e in step.counts if states[e] != "resident" and places[e] != "cpu"}
        self.resident[layer] |= new
        scope: Iterable[int] = range(len(self.resident)) if case.capacity is None else (layer,)
        everyone = sorted(((la, e) for la in scope for e in self.resident[la]), key=self.value)
        if case.admission == "demand":  # the active set last, newcomers only
            others = [k for k in everyone if not (k[0] == layer and k[1] in step.counts)]
            everyone = others + [k for k in everyone if k[0] == layer and k[1] in new]
        leaving = []
        for key in everyone:
            if case.capacity is not None:
                fits = len(self.resident[layer]) <= case.capacity[layer]
            else:
                fits = self.bytes() <= case.budget
            if fits:
                break
            self.resident[key[0]].discard(key[1])
            leaving.append(key)
        stays = new & self.resident[layer]
        return stays, [k for k in leaving if not (k[0] == layer and k[1] in new)]

    def one_by_one(
        self,
        step: Active,
        states: dict[int, str],
        places: dict[int, str],
        value: dict[int, tuple[float, Any]],
    ) -> tuple[set[int], list[tuple[int, int]]]:
        """Naive replay: a miss evicts, then inserts; until its turn an expert has its old score."""
        here, slots = self.resident[step.layer], self.case.capacity[step.layer]
        stays: set[int] = set()
        evicted = []
        served = step.order if self.case.by_mention else sorted(step.counts)
        for turn, e in enumerate(served):
            if e in here:
                states[e], places[e] = "resident", "gpu"
            else:
                if states[e] == "resident":  # evicted before its turn
                    states[e] = "absent"
                places[e] = "transfer" if states[e] == "absent" else "gpu"
                while here and len(here) >= slots:
                    victim = min(here, key=value.__getitem__)
                    here.discard(victim)
                    if victim in stays:
                        stays.discard(victim)
                    else:
                        evicted.append((step.layer, victim))
                if len(here) < slots:
                    here.add(e)
                    stays.add(e)
            self.age[step.layer, e] += turn - step.order.index(e)  # recency: the order of service
            value[e] = self.value((step.layer, e))
        return stays, evicted

    def book_leaving(self, key: tuple[int, int]) -> None:
        if key in self.unused:
            self.unused.discard(key)
            self.sums["wasted"] += self.case.sizes[key[0]]

    def book(
        self,
        step: Active,
        states: dict[int, str],
        places: dict[int, str],
        evicted: list[tuple[int, int]],
    ) -> None:
        """Prefetched bytes: useful at the first hit, late if on the way, wasted if evicted."""
        size = self.case.sizes[step.layer]
        for e, state in states.items():
            key = (step.layer, e)
            if state == "resident" and key in self.unused:
                self.unused.discard(key)
                self.sums["useful"] += size
            elif state == "landed" and places[e] != "cpu":
                self.sums["useful"] += size
            elif state == "in flight" and places[e] != "cpu":
                self.sums["late"] += size
        for key in evicted:
            self.book_leaving(key)

    def commit(
        self, index: int, step: Active, states: dict[int, str], places: dict[int, str]
    ) -> None:
        """The layer is done: its landed prefetches leave staging, but for those due later."""
        layer = step.layer
        for key in sorted(k for k, s in self.staged.items() if k[0] == layer and s.landed):
            staged, expert = self.staged[key], key[1]
            used = states.get(expert) in ("landed", "in flight") and places[expert] != "cpu"
            if used:
                del self.staged[key]
            elif staged.kind == FILL:
                self.join(key)
            elif staged.due <= index:
                self.waste(key)
