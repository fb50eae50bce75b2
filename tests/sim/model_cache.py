"""The cache of the model in `model.py`: who is resident, who stays, and whose bytes were in vain.

Sets, dicts and sorting, from DESIGN §4; the engine selects and indexes instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

HOLD, FILL = 0, 1
Key = tuple[int, int]
"""(layer, expert)."""


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


class Residents:
    """Residency, scores and staged experts, and the bytes of prefetches in `sums`."""

    case: Case
    sums: dict[str, int]

    def forget(self) -> None:
        layers = range(len(self.case.experts))
        self.resident: list[set[int]] = [set() for _ in layers]
        self.score: dict[Key, float] = {}
        self.age = {(la, e): -1 - e for la in layers for e in range(self.case.experts[la])}
        self.staged: dict[Key, Staged] = {}
        self.unused: set[Key] = set()  # residents fetched ahead and not used since
        self.to_come: set[Key] = set()  # residents whose copy has not begun
        self.passing = 0  # experts of the step on the device that are no residents (any more)
        self.pool_taken = 0  # slots of the pool that FILLs took since a layer-step's decision

    def release_staging(self, layer: int) -> None:
        """A staging slot of this layer's expert is free again; the clock may have a use for it."""

    def pool_shrank(self, before: int) -> None:
        """A staged expert has joined the pool, of which so many bytes were free before."""

    def bytes(self) -> int:
        return sum(len(r) * s for r, s in zip(self.resident, self.case.sizes, strict=True))

    def check_room(self, layer: int) -> None:
        """What is on the device fits it: residents in their room, all else in staging slots.

        A staging slot holds an expert of any size; an expert that joins stays in its slot.
        """
        case = self.case
        here = [(la, e) for la in range(len(self.resident)) for e in self.resident[la]]
        on_device = [la for la, e in here if (la, e) not in self.to_come | self.staged.keys()]
        on_device += [la for la, _ in self.staged] + [layer] * self.passing
        if case.capacity is not None:
            mine = on_device.count(layer) + sum(la != layer for la, _ in self.staged)
            assert mine <= case.capacity[layer] + case.staging
            return
        sizes = sorted(case.sizes[la] for la in on_device)
        in_the_pool = sizes[: max(0, len(sizes) - case.staging)]
        assert sum(in_the_pool) <= case.budget

    def value(self, key: Key) -> tuple[float, Any]:
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
    ) -> tuple[set[int], list[Key]]:
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
    ) -> tuple[set[int], list[Key]]:
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

    def book(
        self,
        step: Active,
        states: dict[int, str],
        places: dict[int, str],
        evicted: list[Key],
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

    def book_leaving(self, key: Key) -> None:
        if key in self.unused:
            self.unused.discard(key)
            self.sums["wasted"] += self.case.sizes[key[0]]

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

    def unstage(self, key: Key) -> None:
        del self.staged[key]
        self.release_staging(key[0])

    def waste(self, key: Key) -> None:
        self.unstage(key)
        self.sums["wasted"] += self.case.sizes[key[0]]

    def join(self, key: Key) -> None:
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
        if self.case.capacity is None and not full:  # room of the pool is gone for all layers
            before = self.case.budget - self.bytes()
            del self.staged[key]
            self.resident[layer].add(expert)
            self.pool_shrank(before)
        else:
            self.unstage(key)
            self.resident[layer].add(expert)
        self.unused.add(key)
