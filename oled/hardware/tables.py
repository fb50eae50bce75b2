"""Measured times on a grid of tokens (and active experts): interpolation and extrapolation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np

from oled.errors import UserError
from oled.hardware.files import check_keys
from oled.hardware.quantity import UNITS, Bound, Dimension, Tag
from oled.types import Doubles, Ints

Formula = Callable[[Ints, Ints], Doubles]
"""Times, float64[tokens, active], for arrays of tokens and of active experts."""

_KEYS = ("expert_bytes", "top_k", "tokens", "active", "time")
_TIME_KEYS = ("value", "low", "high", "unit", "tag", "source")


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredTable:
    """Times of one expert shape, in ns; a CPU table has one column, `active` = (1,).

    `value`, `low`, `high`: float64[tokens, active], NaN where a pair cannot occur (more active
    experts than tokens x top_k).
    """

    expert_bytes: int
    top_k: int | None  # of a launch group; None for a CPU table
    tokens: tuple[int, ...]
    active: tuple[int, ...]
    value: Doubles
    low: Doubles
    high: Doubles
    tag: Tag
    source: str

    def at(self, bound: Bound) -> Self:
        """The table with all its times at one end."""
        ends = {"fast": self.low, "low": self.low, "slow": self.high, "high": self.high}
        times = ends.get(bound, self.value)
        return replace(self, value=times, low=times, high=times)

    def lookup(self, formula: Formula, last_tokens: int, last_active: int) -> Doubles:
        """Times for 0..last_tokens tokens and 0..last_active experts, ns.

        Bilinear inside the grid. Outside, the nearest time on its edge grows or shrinks as the
        formula does: continuous, never negative, and flat only where the formula is.

        Args: formula: the model's times by (tokens, active), positive at all nodes.
        Returns: float64[last_tokens + 1, last_active + 1].
        """
        tokens, active = np.arange(last_tokens + 1), np.arange(last_active + 1)
        near_tokens = np.clip(tokens, self.tokens[0], self.tokens[-1])
        near_active = np.clip(active, self.active[0], self.active[-1])
        grid = _filled(self.value)
        inside = _hats(self.tokens, near_tokens) @ grid @ _hats(self.active, near_active).T
        growth = formula(tokens, active) / formula(near_tokens, near_active)
        return np.asarray(inside * growth)

    def outside(self, last_tokens: int, last_active: int) -> list[str]:
        """What a look-up of 1..last needs beyond the measured ranges, in words."""
        return [
            f"{what}: {axis[0]} to {axis[-1]} were measured, 1 to {last} needed"
            for what, axis, last in (
                ("tokens", self.tokens, last_tokens),
                ("active experts", self.active, last_active),
            )
            if last > axis[-1] or axis[0] > 1
        ]

    @classmethod
    def parse(cls, data: Any, where: str) -> Self:
        """Read a table of a profile; see conf/hardware/README.md."""
        if not isinstance(data, Mapping) or not isinstance(data.get("time"), Mapping):
            raise UserError(f"{where}: must be a mapping of {', '.join(_KEYS)}, `time` another")
        check_keys(data, _KEYS, optional=("top_k", "active"), where=where)
        time = data["time"]
        check_keys(time, _TIME_KEYS, optional=("low", "high"), where=f"{where}: time")
        unit, tag = time["unit"], time["tag"]
        if unit not in UNITS or UNITS[unit][0] is not Dimension.TIME:
            raise UserError(f"{where}: time is in '{unit}'; use ns, us or ms")
        if tag not in set(Tag):
            raise UserError(f"{where}: tag '{tag}' is not one of {', '.join(Tag)}")
        tokens = _axis(data["tokens"], f"{where}: tokens")
        active = _axis(data.get("active", [1]), f"{where}: active")
        shape, scale = (len(tokens), len(active)), UNITS[unit][1]
        value, low, high = (
            _grid(time.get(end, time["value"]), shape, f"{where}: time.{end}") * scale
            for end in ("value", "low", "high")
        )
        if (low > value).any() or (value > high).any():
            raise UserError(f"{where}: time needs low <= value <= high in every cell")
        top_k = data.get("top_k")
        return cls(
            expert_bytes=_whole(data["expert_bytes"], f"{where}: expert_bytes"),
            top_k=None if top_k is None else _whole(top_k, f"{where}: top_k"),
            tokens=tokens,
            active=active,
            value=value,
            low=low,
            high=high,
            tag=Tag(tag),
            source=str(time["source"]),
        )


def matching(
    tables: tuple[MeasuredTable, ...], expert_bytes: int, top_k: int
) -> MeasuredTable | None:
    """The table that was measured with this expert."""
    fitting = (t for t in tables if t.expert_bytes == expert_bytes and t.top_k in (None, top_k))
    return next(fitting, None)


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{where} holds {value!r}; it must be a whole number, 1 or more")
    return value


def _axis(values: Any, where: str) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise UserError(f"{where} is {values!r}; it must be a list of whole numbers")
    axis = tuple(_whole(value, where) for value in values)
    if not axis or any(a >= b for a, b in pairwise(axis)):
        raise UserError(f"{where} is {list(axis)}; it must ascend")
    return axis


def _grid(rows: Any, shape: tuple[int, int], where: str) -> Doubles:
    try:
        grid = np.array(rows, dtype=np.float64).reshape(shape)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} must hold {shape[0]} x {shape[1]} numbers or null") from error
    if np.isnan(grid[-1]).any():
        raise UserError(f"{where}: the row with the most tokens must be complete")
    if (grid <= 0).any():
        raise UserError(f"{where} holds {np.nanmin(grid):g}; times must be positive")
    return grid


def _filled(grid: Doubles) -> Doubles:
    """Cells that cannot occur take the time of the next row that was measured."""
    grid = grid.copy()
    for row in range(grid.shape[0] - 2, -1, -1):
        grid[row] = np.where(np.isnan(grid[row]), grid[row + 1], grid[row])
    return grid


def _hats(nodes: tuple[int, ...], at: Ints) -> Doubles:
    """Weights of linear interpolation. Returns: float64[at, nodes]."""
    return np.stack([np.interp(at, nodes, unit) for unit in np.eye(len(nodes))], axis=1)
