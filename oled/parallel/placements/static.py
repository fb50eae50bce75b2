"""Static expert parallelism: rank r holds the r-th stretch of expert ids, and nothing moves.

What inference engines do by default. The baseline of what follows.
"""

from __future__ import annotations

import dataclasses

from oled.parallel.placement import Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Static(Placement):
    """Contiguous ids, one copy each."""

    def __post_init__(self) -> None:
        if self.interval != 0 or self.spare != 0:
            raise ValueError(
                f"interval is {self.interval} and spare {self.spare}; a static placement has none"
            )
