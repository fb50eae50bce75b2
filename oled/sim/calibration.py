"""What policies learn from another trace before they are judged."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled.trace.steps import Steps


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """What was learned from another trace."""

    prior: NDArray[np.float64]  # [L, E] share of the layer's tokens that an expert took
    store: NDArray[np.float64]  # [M, L, E] one activation matrix a request

    @classmethod
    def none(cls, layers: int, experts: int) -> Calibration:
        return cls(np.zeros((layers, experts)), np.zeros((0, layers, experts)))

    @classmethod
    def from_steps(cls, steps: Steps) -> Calibration:
        """Token counts per request, layer and expert, rows normalised to sum 1."""
        experts = int(steps.num_experts.max())
        requests = np.unique(steps.request, return_inverse=True)[1]
        entry_step = np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))
        store = np.zeros((int(requests.max()) + 1, steps.num_layers, experts))
        where = (requests[steps.forward[entry_step]], steps.layer[entry_step], steps.expert)
        np.add.at(store, where, steps.count)
        prior = store.sum(axis=0)
        return cls(
            prior / np.maximum(prior.sum(axis=1, keepdims=True), 1.0),
            store / np.maximum(store.sum(axis=2, keepdims=True), 1.0),
        )
