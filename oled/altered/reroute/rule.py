"""The interface of a rule: its input, and the pool that it returns.

Letters: T tokens of a block in one forward, k experts a token, E routed experts of the layer.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -np.inf
"""The score of an expert whose score was not recorded: it is never chosen."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """One MoE layer of one forward of one block, as its router left it."""

    ids: NDArray[np.int64]  # [T, k], NO_EXPERT unused, E and above experts without weights
    weights: NDArray[np.float32]  # [T, k] as applied
    scores: NDArray[np.float32]  # [T, E] before a selection bias, UNKNOWN where not recorded
    chosen_by: NDArray[np.float32]  # [T, E] what the router chose by: with its bias

    @property
    def num_experts(self) -> int:
        """Return E."""
        return int(self.scores.shape[1])

    @property
    def top_k(self) -> int:
        """Return k."""
        return int(self.ids.shape[1])

    @property
    def real(self) -> NDArray[np.bool_]:
        """Return which slots [T, k] name an expert with weights."""
        return self.ids < self.num_experts

    def votes(self, slots: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return each expert's weight [E], added up over the chosen slots (all by default)."""
        counted = self.real if slots is None else self.real & slots
        found = np.bincount(self.ids[counted], self.weights[counted], self.num_experts)
        return found.astype(np.float64)


@dataclasses.dataclass(frozen=True, slots=True)
class Reroute(abc.ABC):
    """A rule; its hyper-parameters are its fields. A composition names it under `reroute`."""

    needs: ClassVar[frozenset[str]] = frozenset({"weights", "scores", "blocks"})

    @property
    def keeps_pool(self) -> bool:
        """Return whether the pool of a block's first forward serves all its forwards."""
        return False

    @abc.abstractmethod
    def pool(self, routed: Routed) -> NDArray[np.bool_]:
        """Return the experts [E] that the block's tokens may use, at least k of them."""

    def describe(self) -> dict[str, Any]:
        """Return name and hyper-parameters, for manifests and labels."""
        return {"rule": type(self).__name__, **dataclasses.asdict(self)}


def best(votes: NDArray[Any], count: int) -> NDArray[np.bool_]:
    """Return a mask of the `count` experts with most votes, the lower id first among equals."""
    mask = np.zeros(votes.size, dtype=bool)
    mask[np.argsort(-votes, kind="stable")[:count]] = True
    return mask


def pool_size(share: float, routed: Routed) -> int:
    """Return a share of the layer's experts as a number, at least k."""
    return max(routed.top_k, round(share * routed.num_experts))


def require_share(share: float, name: str = "share") -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{name} is {share}; it must be above 0, at most 1")
