"""What a prefetcher may look at while a model decodes: the past, and the order of what comes.

The layers of a forward follow each other, and until a request has ended there may be one forward
more; so the layer-steps to come are known by layer, not by experts. L MoE layers, H horizons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.policies.interface import Side

Predicted = tuple[NDArray[np.uint16], NDArray[np.float32]]
"""Experts and their summed weights, most wanted first, as in a trace."""


class Growing:
    """An array that grows."""

    def __init__(self, dtype: Any) -> None:
        self._room = np.zeros(1024, dtype)
        self._size = 0

    def extend(self, values: Sequence[Any] | NDArray[Any]) -> None:
        size = self._size + len(values)
        if size > self._room.size:
            self._room = np.concatenate([self._room, np.zeros(size, self._room.dtype)])
        self._room[self._size : size] = values
        self._size = size

    @property
    def values(self) -> NDArray[Any]:
        return self._room[: self._size]


class Foresight:
    """The `Side` of a decoding that goes on. Predictions come one layer-step after the other."""

    def __init__(self, layers: int, horizons: int, store: NDArray[np.float64], seed: int) -> None:
        self.horizons = horizons
        self.layers = layers
        self._store = np.ascontiguousarray(store)
        self._seed = seed
        self._requests: list[int] = []
        self._offsets = Growing(np.int64)
        self._offsets.extend([0])
        self._experts = Growing(np.uint16)
        self._scores = Growing(np.float32)

    def begin_forward(self, request: int) -> None:
        """The next forward is of this request (0.. consecutive)."""
        self._requests.append(request)

    def add(self, predictions: Mapping[int, Predicted]) -> None:
        """What was predicted at the next layer-step, by layers ahead: 1..H, not all of them."""
        end = int(self._offsets.values[-1])
        for ahead in range(1, self.horizons + 1):
            if ahead in predictions:
                experts, scores = predictions[ahead]
                self._experts.extend(experts)
                self._scores.extend(scores)
                end += len(experts)
            self._offsets.extend([end])

    @property
    def predictions(self) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.float32]]:
        """Offsets [S * H + 1], experts and scores, as in `oled.trace.steps.Steps`."""
        return self._offsets.values, self._experts.values, self._scores.values

    def side(self, forward: int) -> Side:
        """What is known during `forward`: one more of its request seems to follow."""
        forwards = forward + 2
        offsets, expert, score = self.predictions
        none = np.zeros(0, np.int64)
        return Side(
            offsets=none,
            expert=np.zeros(0, np.uint16),
            layer=np.tile(np.arange(self.layers), forwards),
            forward=np.repeat(np.arange(forwards), self.layers),
            forward_request=np.array(
                [*self._requests[: forward + 1], self._requests[forward]], np.int64
            ),
            pred_offsets=offsets,
            pred_expert=expert,
            pred_score=score,
            horizons=self.horizons,
            store=self._store,
            seed=self._seed,
        )
