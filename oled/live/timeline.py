"""A backend's log as a timeline, with the simulator's lane names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oled.sim.timeline import Timeline


def live_timeline(entries: NDArray[np.int64], layers: Sequence[int], name: str) -> Timeline:
    """Entries of a backend, their clock begun at zero."""
    shifted = entries.copy()
    if len(shifted):
        shifted[:, 1:3] -= shifted[:, 1].min()
    return Timeline(name, tuple(layers), shifted, "live")
