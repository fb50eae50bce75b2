"""Replays of a token's experts in plain Python, by the rules of others (data README, §2).

`accesses`: one list of expert ids a token, served in the order given. All return misses a token.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

Accesses = Sequence[Sequence[int]]
NEVER = 10**12


def published(accesses: Accesses, capacity: int, value: Callable[..., Any]) -> float:
    """The rule behind the published table: a miss evicts the first minimum met when iterating a set
    of ints, then inserts. `value(expert, token, uses)`: the lowest leaves.
    """
    inside: set[int] = set()
    stamp: dict[int, int] = {}
    uses: dict[int, int] = defaultdict(int)
    misses = 0
    for token, experts in enumerate(accesses):
        for expert in experts:
            uses[expert] += 1
            if expert not in inside:
                misses += 1
                while len(inside) >= capacity:
                    victim = min(inside, key=lambda e: value(e, token, stamp, uses))
                    inside.remove(victim)
                    stamp.pop(victim, None)
                inside.add(expert)
            stamp[expert] = token
    return misses / len(accesses)


def lru(expert: int, token: int, stamp: dict[int, int], uses: dict[int, int]) -> int:
    return stamp[expert]


def lfu(expert: int, token: int, stamp: dict[int, int], uses: dict[int, int]) -> int:
    return uses[expert]


def furthest(accesses: Accesses) -> Callable[..., int]:
    """Belady's rule for `published`: next use after the current token; the furthest is lowest."""
    where: dict[int, list[int]] = defaultdict(list)
    for token, experts in enumerate(accesses):
        for expert in experts:
            where[expert].append(token)
    at: dict[int, int] = defaultdict(int)

    def value(expert: int, token: int, stamp: dict[int, int], uses: dict[int, int]) -> int:
        tokens = where[expert]
        while at[expert] < len(tokens) and tokens[at[expert]] <= token:
            at[expert] += 1
        return -tokens[at[expert]] if at[expert] < len(tokens) else -NEVER

    return value


def static(accesses: Accesses, capacity: int, experts: int) -> set[float]:
    """The most frequent experts of the first fifth of the tokens stay for ever.

    Which of equally frequent ones are in is the sorting routine's affair: all answers are given.
    """
    early, all_uses = [0] * experts, [0] * experts
    for token, ids in enumerate(accesses):
        for expert in ids:
            all_uses[expert] += 1
            early[expert] += token < len(accesses) // 5
    last = sorted(early, reverse=True)[capacity - 1]
    surely = [e for e in range(experts) if early[e] > last]
    tied = [e for e in range(experts) if early[e] == last]
    misses = sum(all_uses) - sum(all_uses[e] for e in surely)
    chosen = itertools.combinations(tied, capacity - len(surely))
    return {(misses - sum(all_uses[e] for e in some)) / len(accesses) for some in chosen}


def atomic_lru(accesses: Accesses, capacity: int, by_entry: bool) -> float:
    """A token's experts are one request: all enter, then the oldest others leave.

    Of those last used by the same token, the one that entered the cache first leaves first, or the
    one named first.
    """
    stamp: dict[int, tuple[int, int]] = {}
    entered: dict[int, int] = {}
    misses = 0
    for token, experts in enumerate(accesses):
        for turn, expert in enumerate(experts):
            if expert not in stamp:
                misses += 1
                entered[expert] = token * len(experts) + turn
            stamp[expert] = (token, turn)
        old = sorted(
            (e for e in stamp if e not in experts),
            key=lambda e: (stamp[e][0], entered[e]) if by_entry else stamp[e],
        )
        for expert in old[: max(0, len(stamp) - capacity)]:
            del stamp[expert]
    return misses / len(accesses)
