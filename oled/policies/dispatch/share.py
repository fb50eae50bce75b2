"""Fixed share: of the misses, the same share always runs on the CPU (llama.cpp's MoE cache).

Source: llama.cpp's documentation `docs/moe-cache.md` at b12191 (`--moe-cache-cpu-share`): a share F
of the misses runs on the CPU, the others are uploaded; until the cache is full every miss is.
*Reconstruction*: which misses are meant is not documented; here the CPU gets those with the fewest
tokens, their number rounded down, and the cache is full when the layer's slots are. Cost:
O(A log A).
"""

from __future__ import annotations

import dataclasses

from oled.policies.dispatch.misses import by_tokens, split
from oled.policies.interface import DISPATCH, Cache, Costs, Plan, Step
from oled.policies.kernel import NoMemory, kernel
from oled.policies.part import Dispatch


@kernel(DISPATCH)
def dispatch(
    step: Step, cache: Cache, costs: Costs, plan: Plan, memory: NoMemory, params: CpuShare
) -> None:
    if cache.used[step.layer] < cache.capacity[step.layer]:
        return
    misses = by_tokens(step, cache, plan)
    split(cache, plan, misses, misses - int(params.share * misses))


@dataclasses.dataclass(frozen=True, slots=True)
class CpuShare(Dispatch):
    """A fixed share of the misses on the CPU."""

    share: float = 0.5

    reads_costs = False
    dispatch = dispatch

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"share is {self.share}; it must lie in [0, 1]")
