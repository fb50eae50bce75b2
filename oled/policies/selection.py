"""The order in which experts leave: lowest score first, then the least recently used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled._jit import jitable


@jitable
def select_lowest(
    key: NDArray[np.float64], age: NDArray[np.int64], item: NDArray[np.int64], n: int, lowest: int
) -> None:
    """Partition the first `n` entries so that the `lowest` lowest come first (quickselect).

    Entries are compared by (key, age); where ages are unique, the *set* chosen does not depend on
    how the partition proceeds. key f64[>=2n], age i64[>=2n], item i64[>=2n]; permuted in place, the
    second half is scratch. Both sides are always written and only the counters depend on the
    comparison, because a mispredicted branch costs more than the writes.
    """
    scratch = key.size // 2
    left, right = 0, n
    while left < lowest < right:
        pivot_key, pivot_age = _median_of_three(key, age, left, right)
        low, high = left, scratch
        for i in range(left, right):
            this_key, this_age, this_item = key[i], age[i], item[i]
            below = int((this_key < pivot_key) | ((this_key == pivot_key) & (this_age < pivot_age)))
            key[low], age[low], item[low] = this_key, this_age, this_item
            key[high], age[high], item[high] = this_key, this_age, this_item
            low += below
            high += 1 - below
        for i in range(high - scratch):
            key[low + i], age[low + i] = key[scratch + i], age[scratch + i]
            item[low + i] = item[scratch + i]
        if low == left:  # nothing is below the pivot (equal ages, or no number): it goes first
            _swap_to_front(key, age, item, left, right, pivot_key, pivot_age)
            left += 1
        elif lowest <= low:
            right = low
        else:
            left = low


@jitable
def _swap_to_front(
    key: NDArray[np.float64],
    age: NDArray[np.int64],
    item: NDArray[np.int64],
    left: int,
    right: int,
    pivot_key: float,
    pivot_age: int,
) -> None:
    for i in range(left, right):
        if key[i] == pivot_key and age[i] == pivot_age:
            key[left], key[i] = key[i], key[left]
            age[left], age[i] = age[i], age[left]
            item[left], item[i] = item[i], item[left]
            return


@jitable
def _median_of_three(
    key: NDArray[np.float64], age: NDArray[np.int64], left: int, right: int
) -> tuple[float, int]:
    """The middle of the first, the middle and the last entry; the larger one of two entries."""
    a, b, c = left, (left + right) // 2, right - 1
    if _before(key, age, b, a):
        a, b = b, a
    if c != a and _before(key, age, c, b):
        b = a if _before(key, age, c, a) else c
    return key[b], age[b]


@jitable
def _before(key: NDArray[np.float64], age: NDArray[np.int64], i: int, j: int) -> bool:
    return bool(key[i] < key[j] or (key[i] == key[j] and age[i] < age[j]))


@jitable
def sort_lowest(
    key: NDArray[np.float64], age: NDArray[np.int64], item: NDArray[np.int64], n: int
) -> None:
    """Sort the first `n` entries, lowest first, by (key, age): Shell's sort, in place.

    Ages are unique, so the order is too. For the few dozen entries of an active set.
    """
    gap = 1
    while gap < n // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, n):
            this_key, this_age, this_item = key[i], age[i], item[i]
            j = i
            while j >= gap and (
                key[j - gap] > this_key or (key[j - gap] == this_key and age[j - gap] > this_age)
            ):
                key[j], age[j], item[j] = key[j - gap], age[j - gap], item[j - gap]
                j -= gap
            key[j], age[j], item[j] = this_key, this_age, this_item
        gap //= 3


@jitable
def sort_by_rank(
    order: NDArray[np.int64], rank: NDArray[np.float64], first: int, last: int
) -> None:
    """Stable insertion sort of `order[first:last]` by `rank[item]`: mostly sorted, mostly short."""
    for j in range(first + 1, last):
        item = order[j]
        this_rank = rank[item]
        k = j
        while k > first and rank[order[k - 1]] > this_rank:
            order[k] = order[k - 1]
            k -= 1
        order[k] = item
