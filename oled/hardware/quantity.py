"""A number with its unit, its spread, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, Self

from oled.errors import UserError, nearest

Bound = Literal["value", "low", "high", "fast", "slow"]
"""`low` and `high` are the ends of each number; `fast` and `slow` those that make a machine so."""


class Tag(StrEnum):
    """How a number is known."""

    MEASURED = "measured"
    VENDOR = "vendor"
    DERIVED = "derived"  # computed from measured data
    ASSUMED = "assumed"  # no public measurement found


class Dimension(StrEnum):
    """What a number counts; the comment is the unit that the code computes in."""

    TIME = "time"  # ns
    RATE = "rate"  # bytes/s
    ARITHMETIC = "arithmetic"  # flop/s
    RATIO = "ratio"  # 1
    COUNT = "count"  # 1


UNITS: dict[str, tuple[Dimension, float]] = {
    "ns": (Dimension.TIME, 1.0),
    "us": (Dimension.TIME, 1e3),
    "ms": (Dimension.TIME, 1e6),
    "MB/s": (Dimension.RATE, 1e6),
    "GB/s": (Dimension.RATE, 1e9),
    "TB/s": (Dimension.RATE, 1e12),
    "GFLOPS": (Dimension.ARITHMETIC, 1e9),
    "TFLOPS": (Dimension.ARITHMETIC, 1e12),
    "1": (Dimension.RATIO, 1.0),
    "tokens": (Dimension.COUNT, 1.0),
    "passes": (Dimension.COUNT, 1.0),
}

_KEYS = ("value", "low", "high", "unit", "tag", "source")


@dataclass(frozen=True, slots=True)
class Quantity:
    """`value` with low <= value <= high, in `unit`."""

    value: float
    low: float
    high: float
    unit: str
    tag: Tag
    source: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UserError(f"unit '{self.unit}' is not known; use one of {', '.join(UNITS)}")
        if not 0 <= self.low <= self.value <= self.high < float("inf"):
            raise UserError(
                f"needs 0 <= low <= value <= high, found low {self.low:g}, value {self.value:g}, "
                f"high {self.high:g}; give all three, or one text such as '{self.value:g} "
                f"{self.unit}'"
            )
        if not self.source:
            raise UserError("'source' is empty; say who measured or assumed the number")

    @property
    def dimension(self) -> Dimension:
        return UNITS[self.unit][0]

    @property
    def base(self) -> float:
        """`value` in the unit that the code computes in: ns, bytes/s, flop/s or 1."""
        return self.value * UNITS[self.unit][1]

    def at(self, bound: Bound) -> Self:
        """The same number fixed at one end of its spread."""
        if bound in ("fast", "slow"):
            low_is_fast = self.dimension in (Dimension.TIME, Dimension.COUNT)
            bound = "low" if low_is_fast == (bound == "fast") else "high"
        number = {"value": self.value, "low": self.low, "high": self.high}[bound]
        return replace(self, value=number, low=number, high=number)

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Read a mapping of the six keys, or a user's text such as '25 GB/s'."""
        if isinstance(data, str):
            return cls._from_text(data)
        if not isinstance(data, Mapping):
            raise UserError(
                f"is {data!r}; write a text such as '25 GB/s' or a mapping of {', '.join(_KEYS)}"
            )
        for key in data:
            if key not in _KEYS:
                raise UserError(f"key '{key}' is not known; {nearest(str(key), _KEYS)}")
        for key in _KEYS:
            if key not in data:
                raise UserError(f"'{key}' is missing")
        for key in ("value", "low", "high"):
            if isinstance(data[key], bool) or not isinstance(data[key], int | float):
                raise UserError(f"'{key}' is {data[key]!r}; it must be a number")
        if data["tag"] not in set(Tag):
            raise UserError(f"tag '{data['tag']}' is not one of {', '.join(Tag)}")
        return cls(
            value=float(data["value"]),
            low=float(data["low"]),
            high=float(data["high"]),
            unit=str(data["unit"]),
            tag=Tag(data["tag"]),
            source=str(data["source"] or ""),
        )

    @classmethod
    def _from_text(cls, text: str) -> Self:
        number, _, unit = text.strip().partition(" ")
        try:
            value = float(number)
        except ValueError:
            raise UserError(f"is '{text}'; write a number and a unit, such as '25 GB/s'") from None
        return cls(value, value, value, unit.strip() or "1", Tag.ASSUMED, "set by the user")
