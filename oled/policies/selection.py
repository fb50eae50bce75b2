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
