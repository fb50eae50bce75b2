"""Measured times on a grid of tokens (and active experts): interpolation, marked extrapolation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.hardware.quantity import UNITS, Bound, Dimension, Tag

_KEYS = ("expert_bytes", "top_k", "tokens", "active", "time")


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredTable:
    """Times of one expert shape, in ns; a CPU table has one column, `active` = (1,).

    `value`, `low`, `high`: float64[tokens, active], NaN where a pair cannot occur (more active
    experts than tokens x top_k).
    """

    expert_bytes: int
    top_k: int
    tokens: tuple[int, ...]
    active: tuple[int, ...]
    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    tag: Tag
    source: str

    def at(self, bound: Bound) -> Self:
        """The table with all its times at one end."""
        ends = {"fast": self.low, "low": self.low, "slow": self.high, "high": self.high}
        times = ends.get(bound, self.value)
        return replace(self, value=times, low=times, high=times)

    def lookup(self, last_tokens: int, last_active: int, floor_ns: float) -> NDArray[np.float64]:
        """Times for 0..last_tokens tokens and 0..last_active experts, ns.

        Bilinear inside the grid. Beyond its far edges the last slope goes on, never downwards; with
        fewer experts than the grid has, the line to `floor_ns` at no expert. Zero work costs zero.

        Returns: float64[last_tokens + 1, last_active + 1].
        """
        grid = _filled(self.value)
        tokens, grid = _extended(self.tokens, grid, last_tokens, floor_ns)
        active, across = _extended(self.active, grid.T, last_active, floor_ns)
        times = _hats(tokens, last_tokens) @ across.T @ _hats(active, last_active).T
        times[0, :] = 0.0
        times[:, 0] = 0.0
        return times

    def outside(self, last_tokens: int, last_active: int) -> list[str]:
        """What the look-up needs beyond the measured ranges, in words."""
        return [
            f"{what} {axis[0]} to {axis[-1]} were measured, 1 to {last} are looked up"
            for what, axis, last in (
                ("tokens", self.tokens, last_tokens),
                ("active experts", self.active, last_active),
            )
            if last > axis[-1] or axis[0] > 1
        ]

    @classmethod
    def parse(cls, data: Any, where: str) -> Self:
        """Read a table of a profile; see conf/hardware/README.md."""
        if not isinstance(data, Mapping):
            raise UserError(f"{where}: must be a mapping of {', '.join(_KEYS)}")
        for key in _KEYS:
            if key not in data and key != "active":
                raise UserError(f"{where}: '{key}' is missing")
        tokens = _axis(data["tokens"], f"{where}: tokens")
        active = _axis(data.get("active", [1]), f"{where}: active")
        time = data["time"]
        unit = time.get("unit")
        if unit not in UNITS or UNITS[unit][0] is not Dimension.TIME:
            raise UserError(f"{where}: time is in '{unit}'; use ns, us or ms")
        shape = (len(tokens), len(active))
        scale = UNITS[unit][1]
        grids = {
            end: _grid(time.get(end, time["value"]), shape, f"{where}: time.{end}") * scale
            for end in ("value", "low", "high")
        }
        if (grids["low"] > grids["value"]).any() or (grids["value"] > grids["high"]).any():
            raise UserError(f"{where}: time needs low <= value <= high in every cell")
        return cls(
            expert_bytes=int(data["expert_bytes"]),
            top_k=int(data["top_k"]),
            tokens=tokens,
            active=active,
            tag=Tag(time["tag"]),
            source=str(time["source"]),
            **grids,
        )


def _axis(values: Any, where: str) -> tuple[int, ...]:
    axis = tuple(int(value) for value in values)
    if not axis or axis[0] < 1 or any(a >= b for a, b in pairwise(axis)):
        raise UserError(f"{where} is {list(axis)}; it must ascend from 1 or more")
    return axis


def _grid(rows: Any, shape: tuple[int, int], where: str) -> NDArray[np.float64]:
    try:
        grid = np.array(rows, dtype=np.float64).reshape(shape)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} must hold {shape[0]} x {shape[1]} numbers or null") from error
    if np.isnan(grid[-1]).any():
        raise UserError(f"{where}: the row with the most tokens must be complete")
    if (grid <= 0).any():
        raise UserError(f"{where} holds {np.nanmin(grid):g}; times must be positive")
    return grid


def _filled(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cells that cannot occur take the time of the next row that was measured."""
    grid = grid.copy()
    for row in range(grid.shape[0] - 2, -1, -1):
        grid[row] = np.where(np.isnan(grid[row]), grid[row + 1], grid[row])
    return grid


def _extended(
    axis: tuple[int, ...], grid: NDArray[np.float64], last: int, floor_ns: float
) -> tuple[list[int], NDArray[np.float64]]:
    """Nodes at 0 and at `last`, so that all look-ups are interpolations. grid: [axis, other]."""
    nodes = list(axis)
    if last > nodes[-1]:
        before, edge = (nodes[-2], grid[-2]) if len(nodes) > 1 else (0, np.zeros_like(grid[-1]))
        slope = np.maximum(0.0, (grid[-1] - edge) / (nodes[-1] - before))
        grid = np.vstack([grid, grid[-1] + slope * (last - nodes[-1])])
        nodes.append(last)
    grid = np.vstack([np.minimum(floor_ns, grid[0]), grid])
    return [0, *nodes], grid


def _hats(nodes: list[int], last: int) -> NDArray[np.float64]:
    """Weights of linear interpolation at 0..last. Returns: float64[last + 1, nodes]."""
    at = np.arange(last + 1)
    return np.stack([np.interp(at, nodes, unit) for unit in np.eye(len(nodes))], axis=1)
