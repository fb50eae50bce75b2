"""Handing out the slots of one budget to the layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled._jit import shared_njit


@shared_njit
def hand_out(
    gain: NDArray[np.float64],
    lowest: NDArray[np.float64],
    most: NDArray[np.float64],
    size: NDArray[np.int64],
    budget: float,
    slots: NDArray[np.int64],
) -> None:
    """Write `slots` i64[L]: from the lowest on, one after the other to the layer that gains most.

    gain f64[L, >= E] is the worth of a layer's next slot when it has so many already; lowest and
    most f64[L] bound the slots of a layer. Slots of `size` bytes never take more
    than `budget` bytes; with one size for all, and room below the highest numbers, the budget is
    used up. Ties go to the layer with fewer slots, then to the earlier one.
    """
    left = budget
    for layer in range(slots.size):
        slots[layer] = int(lowest[layer])
        left -= slots[layer] * size[layer]
    while True:
        best = -1
        for layer in range(slots.size):
            if slots[layer] >= most[layer] or size[layer] > left:
                continue
            if best >= 0:
                mine, other = gain[layer, slots[layer]], gain[best, slots[best]]
                if mine < other or (mine == other and slots[layer] >= slots[best]):
                    continue
            best = layer
        if best < 0:
            return
        slots[best] += 1
        left -= size[best]
