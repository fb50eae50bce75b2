"""Front-loaded: early layers get more slots, by a slope, for ever.

The idea is Fate's (arXiv 2502.12224: more cache for the shallow layers, whose experts are
predicted worst) and KTransformers' placement of that name; the straight line is a
*reconstruction*. Layer l of L gets a share proportional to 1 + slope * (1 - 2 l / (L - 1)) of the
bytes, by largest remainder and never more slots than experts. Cost: none in a run.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled.policies.apportion import hand_out
from oled.policies.part import Allocation


@dataclasses.dataclass(frozen=True, slots=True)
class FrontLoaded(Allocation):
    """More slots for early layers.

    slope: the first layer gets 1 + slope times the mean, the last 1 - slope; 0 <= slope <= 1.
    """

    slope: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.slope <= 1.0:
            raise ValueError(f"slope is {self.slope}; it must lie in [0, 1]")

    def initial(
        self,
        even: NDArray[np.int64],
        num_experts: NDArray[np.int64],
        expert_bytes: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        share = even * (1.0 + self.slope * np.linspace(1.0, -1.0, even.size))
        budget = int((even * expert_bytes).sum())
        wanted = share * budget / max((share * expert_bytes).sum(), 1.0)
        gain = wanted[:, None] - np.arange(num_experts.max())
        lowest, most = np.floor(np.minimum(wanted, num_experts)), num_experts.astype(np.float64)
        slots = np.zeros_like(even)
        hand_out(gain, lowest, most, expert_bytes, float(budget), slots)
        return slots
