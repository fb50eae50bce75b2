"""Surrogates of approximated misses: B·A·x, a low-rank map for each expert (SPICE).

Letters: T tokens, k top-k, h hidden size, E experts of a layer, r rank, n pairs of token and
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oled.errors import UserError
from oled.running.alteration import Alteration
from oled.running.hooks import Compute, replace_experts
from oled.running.modules import MoeLayer, experts_of
from oled.running.predictors import fingerprint, heads_path, read_heads


@dataclass(frozen=True, slots=True, eq=False)
class Surrogates:
    """Of every MoE layer: `down` A [E, r, h] and `up` B [E, h, r]."""

    down: tuple[Tensor, ...]
    up: tuple[Tensor, ...]

    @classmethod
    def load(cls, source: str | Path, layers: Sequence[MoeLayer], device: str) -> Self:
        """Those in a file of heads, or "bundled", made for the experts of `layers`.

        Raises UserError where the file has none, or was made for other experts.
        """
        path = heads_path(source)
        tensors, card = read_heads(path)
        if "surrogate_down.0" not in tensors:
            raise UserError(
                f"{path}: no surrogates of experts; make it again with "
                f"experiments/training/train_predictors.py"
            )
        if card.get("experts") != fingerprint(experts_of(layers)):
            raise UserError(f"{path}: these surrogates were made for other experts")
        down, up = (
            tuple(
                tensors[f"surrogate_{kind}.{row}"].float().to(device) for row in range(len(layers))
            )
            for kind in ("down", "up")
        )
        return cls(down, up)

    @property
    def bytes(self) -> int:
        """On the device, where they always are."""
        return sum(tensor.nbytes for tensor in (*self.down, *self.up))

    @torch.inference_mode()
    def outputs(
        self, layer: int, approximated: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """Weighted sums [T, h], f32, over the slots whose expert is among `approximated` [*].

        hidden [T, h]; ids and weights [T, k].
        """
        token, slot = torch.where(torch.isin(ids, approximated))
        expert = ids[token, slot]
        inside = torch.einsum("nrh,nh->nr", self.down[layer][expert], hidden[token].float())
        made = torch.einsum("nhr,nr->nh", self.up[layer][expert], inside)
        result = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        return result.index_add_(0, token, made * weights[token, slot, None].float())


class StandIns(Alteration):
    """Add the output of surrogates for the misses that a running policy approximates.

    `approximated` returns the experts of the layer-step just computed that were left out.
    """

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        surrogates: Surrogates,
        approximated: Callable[[], NDArray[np.uint16]],
    ) -> None:
        self._layers, self._surrogates, self._approximated = layers, surrogates, approximated

    def summary(self) -> dict[str, Any]:
        """Return the size of the surrogates."""
        return {"surrogate_bytes": self._surrogates.bytes}

    def _install(self, installed: ExitStack) -> None:
        installed.enter_context(replace_experts(self._layers, self._on_experts))

    def _on_experts(
        self, row: int, compute: Compute, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        out, left_out = compute(hidden, ids, weights), self._approximated()
        if not left_out.size:
            return out
        experts = torch.from_numpy(left_out.astype(np.int64)).to(ids.device)
        added = self._surrogates.outputs(row, experts, hidden.detach(), ids, weights.detach())
        return out + added.to(out.dtype)
