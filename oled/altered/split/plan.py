"""The plan of split experts: which expansion each expert uses."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from oled.errors import UserError
from oled.types import Ints


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PathPlan:
    """Name the source of every expert's expansion, by MoE layer; a source is its own source."""

    sources: tuple[Ints, ...]  # [L] of [E]: expert ids
    how: str = "given by hand"  # they were chosen, in words
    about: dict[str, Any] = dataclasses.field(default_factory=dict)  # the same in figures

    def __post_init__(self) -> None:
        for layer, source in enumerate(self.sources):
            if source.min() < 0 or source.max() >= len(source):
                raise UserError(
                    f"paths of MoE layer {layer}: a source is not an expert of the layer"
                )
            if not np.array_equal(source[source], source):
                raise UserError(f"paths of MoE layer {layer}: a source must be its own source")

    @property
    def expansions(self) -> tuple[int, ...]:
        """Return how many expansions are left in each MoE layer."""
        return tuple(len(np.unique(source)) for source in self.sources)

    @property
    def digest(self) -> str:
        """Return a hash of the sources."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(source.tobytes())
        return digest.hexdigest()

    @property
    def bytes_share(self) -> float:
        """Return the bytes of all parts over those of whole experts of one size."""
        experts = sum(len(source) for source in self.sources)
        return (2 * sum(self.expansions) + experts) / (3 * experts)

    def numbered(self, layer: int) -> Ints:
        """Return the number of each expert's expansion, counted from 0: [E]."""
        return np.unique(self.sources[layer], return_inverse=True)[1].astype(np.int64)

    def __str__(self) -> str:
        experts = sum(len(source) for source in self.sources)
        return (
            f"{sum(self.expansions)} of {experts} expansions kept, by layer "
            f"{'/'.join(map(str, self.expansions))}; {self.bytes_share:.0%} of the bytes; "
            f"{self.how}"
        )

    @classmethod
    def at_random(cls, experts: Sequence[int], share: float, top_k: int, seed: int = 0) -> Self:
        """Make up paths: a `share` of each layer's expansions stays, the other experts take any.

        Nothing is measured: use it for traces that are made up themselves.
        """
        if not 0 < share <= 1:
            raise UserError(f"share={share}: it must be above 0, at most 1")
        rng = np.random.default_rng(seed)
        sources = []
        for number in experts:
            kept = rng.permutation(number)[: max(top_k, round(share * number))]
            source = rng.choice(kept, number)
            source[kept] = kept
            sources.append(source.astype(np.int64))
        how = f"made up: {share:.0%} of the expansions kept at random"
        return cls(tuple(sources), how, {"share": share, "seed": seed})
