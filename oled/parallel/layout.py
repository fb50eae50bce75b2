"""The layout of experts on GPUs, and the copies that a change of it needs."""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np
from numpy.typing import NDArray

from oled.types import Bools, Ints


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Copies of experts on R ranks. L layers, E experts of the widest layer."""

    holds: Bools  # [L, R, E]
    primary: Ints  # [L, E] the rank of an expert's first copy; -1 where a layer has no such expert

    @classmethod
    def contiguous(cls, num_experts: Ints, ranks: int) -> Self:
        """Give each rank a stretch of ids, as equal as can be: expert e of E to rank e * R // E."""
        widest = int(num_experts.max())
        primary = np.full((num_experts.size, widest), -1)
        for layer, experts in enumerate(num_experts.tolist()):
            primary[layer, :experts] = np.arange(experts) * ranks // experts
        holds = primary[:, None, :] == np.arange(ranks)[:, None]
        return cls(holds, primary)

    def moved(self, earlier: Layout, ns_per_byte: NDArray[np.float64]) -> Moves:
        """Return the copies that `earlier` had not, each from its fastest source."""
        layer, to, expert = np.nonzero(self.holds & ~earlier.holds)
        cost = np.where(earlier.holds[layer, :, expert], ns_per_byte[:, to].T, np.inf)
        return Moves(layer, np.argmin(cost, axis=1), to)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Experts copied from GPU to GPU: layer, from, to, i64[M] each."""

    layer: Ints
    source: Ints
    target: Ints

    def sent(self, expert_bytes: Ints, ranks: int) -> Ints:
        """Return the bytes i64[R, R] from, to."""
        sent = np.zeros((ranks, ranks), np.int64)
        np.add.at(sent, (self.source, self.target), expert_bytes[self.layer])
        return sent
