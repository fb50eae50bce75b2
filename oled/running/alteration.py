"""A model that computes something else than its own routed experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oled.running.hooks import Hooks

if TYPE_CHECKING:
    from oled.running.decode.batch import Pass

Block = tuple[int, int]
"""Request, and block in it."""
Group = tuple[NDArray[np.int64], Block]
"""The tokens of a pass that belong to one block, and that block."""


class Alteration(Hooks):
    """Change what a model computes inside the context; leaving it gives the model back.

    `announce` or `expect` is called with each pass before it runs; both do nothing here.
    """

    @property
    def begins_with_masks(self) -> bool:
        """Return whether a block's first forward, all of it masked, decides for its later ones."""
        return False

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Return flat figures of what was changed; `str` gives them in words."""

    def announce(self, coming: Pass) -> None:
        """Prepare for a decoding pass that is about to run."""

    def expect(self, tokens: int, groups: Sequence[Group]) -> None:
        """Prepare for a pass of so many tokens; tokens in no group belong to no block."""
