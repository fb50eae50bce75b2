"""The order in which experts leave: lowest score first, then the least recently used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled._jit import inner_njit


@inner_njit
def select_lowest(
    key: NDArray[np.float64], age: NDArray[np.int64], item: NDArray[np.int64], n: int, lowest: int
) -> None:
    """Partition the first `n` entries so that the `lowest` lowest come first (quickselect).

    Entries are compared by (key, age); ages are unique, so the *set* chosen does not depend on how
    the partition proceeds. key f64[>=n], age i64[>=n], item i64[>=n]; all permuted in place.
    """
    left, right = 0, n - 1
    while left < right:
        middle = (left + right) // 2
        pivot_key, pivot_age = key[middle], age[middle]
        i, j = left, right
        while i <= j:
            while key[i] < pivot_key or (key[i] == pivot_key and age[i] < pivot_age):
                i += 1
            while pivot_key < key[j] or (pivot_key == key[j] and pivot_age < age[j]):
                j -= 1
            if i <= j:
                key[i], key[j] = key[j], key[i]
                age[i], age[j] = age[j], age[i]
                item[i], item[j] = item[j], item[i]
                i += 1
                j -= 1
        if lowest <= j:
            right = j
        elif lowest > i:
            left = i
        else:
            return


@inner_njit
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
