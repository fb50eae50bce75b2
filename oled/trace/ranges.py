"""Sets of whole numbers as people write them: `3`, `0-9`, `0-9,12`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import brief
from oled.types import Array, Bools

MAX_NUMBERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Ranges:
    """Numbers and ranges, in the order given."""

    pairs: tuple[tuple[int, int], ...]  # first and last of each

    @classmethod
    def parse(cls, text: str, what: str) -> Self:
        """Read such a text; `what` names it in messages."""
        pairs = []
        for piece in text.split(","):
            match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", piece)
            if match is None or int(match[1]) > int(match[2] or match[1]):
                raise TraceError(f"{what}={brief(text)}: write numbers and ranges, as 0-9,12")
            pairs.append((int(match[1]), int(match[2] or match[1])))
        return cls(tuple(pairs))

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        """Make ranges of a list of numbers."""
        return cls(tuple((number, number) for number in numbers))

    def numbers(self, what: str) -> tuple[int, ...]:
        """Return all numbers, one by one."""
        count = sum(last - first + 1 for first, last in self.pairs)
        if count > MAX_NUMBERS:
            raise TraceError(f"{what}={self}: {count} numbers are too many")
        return tuple(n for first, last in self.pairs for n in range(first, last + 1))

    def among(self, known: Array, what: str) -> Bools:
        """Return which numbers are meant: bool like `known`. Refuse a range that meets none."""
        chosen = np.zeros(len(known), dtype=bool)
        for first, last in self.pairs:
            hit = (known >= first) & (known <= last)
            if not hit.any():
                missing = str(first) if first == last else f"{first}-{last}"
                raise TraceError(f"no {what} {missing}; there are {known.min()} to {known.max()}")
            chosen |= hit
        return chosen

    def __str__(self) -> str:
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.pairs)
