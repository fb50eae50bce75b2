"""What live runs computed, compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oled.types import Floats


class Outputs:
    """The outputs of all layer-steps of a run, f32[T, H] each. Equal: bitwise."""

    def __init__(self, steps: Sequence[Floats]) -> None:
        self.steps = tuple(steps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outputs):
            return NotImplemented
        pairs = zip(self.steps, other.steps, strict=False)
        return len(self.steps) == len(other.steps) and all(
            a.shape == b.shape and np.array_equal(_bits(a), _bits(b)) for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]

    def error(self, other: Outputs) -> float:
        """The largest difference in any layer-step, as a share of its largest output.

        Infinite where something is not finite.
        """
        worst = 0.0
        for mine, theirs in zip(self.steps, other.steps, strict=True):
            largest = float(np.abs(theirs).max(initial=0.0))
            apart = float(np.abs(mine - theirs).max(initial=0.0))
            if not np.isfinite(apart):
                return float("inf")
            worst = max(worst, apart / largest if largest else apart)
        return worst


def _bits(values: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    return np.ascontiguousarray(values).view(np.uint32)
