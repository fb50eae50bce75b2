"""What changes a model's routed experts while it runs, and what such a change must be told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oled.running.decode import Pass

Block = tuple[int, int]
"""Request, and block in it."""
Group = tuple[NDArray[np.int64], Block]
"""Which of a pass's tokens are one block's, and which block that is."""


class Alteration(AbstractContextManager[Any], Protocol):
    """A context in which a model computes something else; leaving it gives the model back.

    `announce` or `expect` is called with each pass before it runs.
    """

    @property
    def begins_with_masks(self) -> bool:
        """Whether a block's first forward, in which all is masked, decides for its later ones."""
        ...

    def summary(self) -> dict[str, Any]:
        """Flat figures of what was changed; `str` says them in words."""
        ...

    def announce(self, coming: Pass) -> None:
        """A decoding pass is about to run."""
        ...

    def expect(self, tokens: int, groups: Sequence[Group]) -> None:
        """A pass of `tokens` tokens is about to run; those in no group belong to no block."""
        ...
