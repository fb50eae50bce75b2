"""Stages of a text, for parts that act at their boundaries only.

A stage is a block of block diffusion or, where the trace was marked (`oled.trace.stages`), a
stretch of autoregressive text between two cues: what `Step.block` numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled._jit import jitable
from oled.policies.interface import PREFILL, Cache, Step
from oled.policies.selection import select_lowest

PROMPT = 1
"""What `stage_of` gives for prefill; 0 is free for 'none yet'."""
RESIDENTS_FIRST = 1 << 60
"""Above every stamp: of equally busy experts a resident is held before one that must be copied."""


@jitable
def stage_of(step: Step) -> int:
    """The number of the step's stage: PROMPT, or above it that of the block."""
    return PROMPT if step.phase == PREFILL else step.block + PROMPT + 2


@jitable
def hold(layer: int, cache: Cache, tokens: NDArray[np.float64]) -> None:
    """Freeze a layer's residency: as many experts as it has slots, those with most `tokens` f64[E].

    They score 1 + their tokens, what else is resident 0.5, and all others 0: until the scores
    change, only an expert of the chosen set can enter, in the place of a resident that is not.
    """
    experts = cache.num_experts[layer]
    for expert in range(experts):
        resident = cache.resident[layer, expert] != 0
        cache.key[expert] = -tokens[expert]
        cache.age[expert] = -cache.stamp[layer, expert] - (RESIDENTS_FIRST if resident else 0)
        cache.item[expert] = expert
        cache.score[layer, expert] = 0.5 if resident else 0.0
    places = min(cache.capacity[layer], experts)
    select_lowest(cache.key, cache.age, cache.item, experts, places)
    for j in range(places):
        expert = cache.item[j]
        cache.score[layer, expert] = 1.0 + tokens[expert]
