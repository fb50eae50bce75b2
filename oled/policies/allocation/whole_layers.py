"""Whole layers: some layers keep all their experts on the GPU, the others none (llama.cpp).

Source: llama.cpp's `--n-cpu-moe N` [documentation]: the experts of the first N layers live in host
memory and are computed there, those of the others on the GPU. N follows from the budget: the last
layers are filled while a whole one fits, and what is left over stays unused. Cost: none in a run.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled.policies.part import Allocation


@dataclasses.dataclass(frozen=True, slots=True)
class WholeLayers(Allocation):
    """All of the last layers that fit, nothing of the others."""

    def initial(
        self,
        even: NDArray[np.int64],
        num_experts: NDArray[np.int64],
        expert_bytes: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        whole = num_experts * expert_bytes
        needed = np.cumsum(whole[::-1])[::-1]  # bytes of this layer and all behind it
        return np.where(needed <= (even * expert_bytes).sum(), num_experts, 0)
