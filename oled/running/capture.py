"""Routing that hooks have seen in one forward, brought to the host.

Shapes: Lr MoE layers, N tokens of the pass (its whole batch), T tokens of one request, k top-k,
m kept ids or scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oled.trace.schema import Prediction, RouterScores


class Staging:
    """Host buffers that the layers of a forward are copied into.

    Copies from CUDA are asynchronous into pinned memory, so that one wait ends a forward. The next
    forward uses the buffers again.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._buffers: dict[str, Tensor] = {}
        self._streams: set[torch.cuda.Stream] = set()  # with copies under way

    def put(self, name: str, row: int, source: Tensor) -> None:
        """Copy `source` [N, ...] into row `row` of the buffer `name`."""
        kind = torch.float32 if source.is_floating_point() else torch.int32
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[1] < len(source):
            # all layers of a forward have N tokens, so only its first layer can get here
            shape = (self._layers, *source.shape)
            buffer = torch.empty(shape, dtype=kind, pin_memory=source.is_cuda)
            self._buffers[name] = buffer
        if source.is_cuda:
            self._streams.add(torch.cuda.current_stream(source.device))
        # a copy even on the CPU: models may go on to change the tensor in place
        buffer[row, : len(source)].copy_(source.detach().to(kind), non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies have landed."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()

    def holds(self, name: str) -> bool:
        """Return whether anything was ever put under this name."""
        return name in self._buffers

    def read(self, name: str, tokens: int) -> NDArray[Any]:
        """Return a copy [Lr, N, ...] of what landed."""
        return self._buffers[name][:, :tokens].numpy().copy()


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """The predictions of one predictor, so many MoE layers ahead."""

    predictor: str
    ahead: int
    rows: frozenset[int]  # at which it predicts
    ids: NDArray[np.int32]  # [Lr, N, m]
    weights: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The routing of one model pass."""

    layers: NDArray[np.uint16]  # [Lr] absolute
    num_experts: NDArray[np.int64]  # [Lr]
    expert_ids: NDArray[np.int32]  # [Lr, N, k]
    weights: NDArray[np.float32]  # [Lr, N, k] as applied
    predicted: tuple[Predicted, ...] = ()
    score_ids: NDArray[np.int32] | None = None  # [Lr, N, m]
    score_values: NDArray[np.float32] | None = None
    score_biased: NDArray[np.float32] | None = None

    def scores(self, tokens: NDArray[np.int64]) -> RouterScores | None:
        """Return the router scores of these tokens, where they were asked for."""
        if self.score_ids is None or self.score_values is None:
            return None
        biased = None if self.score_biased is None else self.score_biased[:, tokens]
        return RouterScores(self.score_ids[:, tokens], self.score_values[:, tokens], biased)

    def predictions(self, tokens: NDArray[np.int64]) -> tuple[Prediction, ...]:
        """Return the predictions for these tokens, added up over them."""
        found = []
        for row, layer in enumerate(self.layers):
            for one in (one for one in self.predicted if row in one.rows):
                target = (row + one.ahead) % len(self.layers)
                ids, weights = one.ids[row, tokens], one.weights[row, tokens]
                experts, scores = wanted(ids, weights, int(self.num_experts[target]))
                about = int(self.layers[target])
                found.append(Prediction(one.predictor, int(layer), about, experts, scores))
        return tuple(found)


def wanted(
    ids: NDArray[np.int32], weights: NDArray[np.float32], num_experts: int
) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Return the experts that any token picked and their summed weights, largest first."""
    total = np.bincount(ids.ravel(), weights.ravel(), num_experts)
    picked = np.flatnonzero(np.bincount(ids.ravel(), minlength=num_experts))
    order = np.argsort(-total[picked], kind="stable")
    experts = picked[order]
    return experts.astype(np.uint16), total[experts].astype(np.float32)
