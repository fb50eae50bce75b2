"""Measured times as the numbers of a profile, and the profile as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from oled.atomic import write_text
from oled.profiling.bench import Spread

SOURCE = "this machine"

Number = dict[str, Any]


def time_of(
    time_ns: Spread, unit: str = "us", tag: str = "measured", source: str = SOURCE
) -> Number:
    scale = {"ns": 1.0, "us": 1e3}[unit]
    ends = (time_ns.low / scale, time_ns.value / scale, time_ns.high / scale)
    return number(*ends, unit, tag, source)


def rate_of(size: int, time_ns: Spread, tag: str = "measured", source: str = SOURCE) -> Number:
    """GB/s: bytes a nanosecond."""
    ends = (size / time_ns.high, size / time_ns.value, size / time_ns.low)
    return number(*ends, "GB/s", tag, source)


def flops_of(count: int, time_ns: Spread, tag: str = "measured", source: str = SOURCE) -> Number:
    ends = (count / time_ns.high, count / time_ns.value, count / time_ns.low)
    return number(*ends, "GFLOPS", tag, source)


def put_in(value: float, unit: str, why: str) -> Number:
    return number(value, value, value, unit, "assumed", why)


def number(low: float, value: float, high: float, unit: str, tag: str, source: str) -> Number:
    rounded = [float(f"{end:.4g}") for end in (value, low, high)]
    keys = ("value", "low", "high", "unit", "tag", "source")
    return dict(zip(keys, (*rounded, unit, tag, source), strict=True))


def table_of(grid: Sequence[Sequence[Spread | None]]) -> dict[str, Any]:
    """The `time` of a measured table; None where a pair cannot occur."""

    def times(end: str) -> list[list[float | None]]:
        return [
            [None if cell is None else _us(getattr(cell, end)) for cell in line] for line in grid
        ]

    ends: dict[str, Any] = {end: times(end) for end in ("value", "low", "high")}
    return {**ends, "unit": "us", "tag": "measured", "source": SOURCE}


def spreads(times: Mapping[str, Spread]) -> dict[str, list[float]]:
    """For readers: [low, median, high] in microseconds by name."""
    return {name: [_us(s.low), _us(s.value), _us(s.high)] for name, s in times.items()}


def _us(time_ns: float) -> float:
    return float(f"{time_ns / 1e3:.4g}")


def write_profile(profile: Mapping[str, Any], file: Path) -> Path:
    """One line a number, as the shipped profiles."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Written by `oled profile`. Format, tags: conf/hardware/README.md.",
        "# Spread: 10th and 90th percentile of single calls.",
    ]
    for key, value in profile.items():
        if isinstance(value, list) or (isinstance(value, dict) and "unit" not in value):
            text = yaml.safe_dump(
                {key: value}, sort_keys=False, default_flow_style=None, width=1000
            )
            lines.append(text.rstrip())
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
            lines.append(f"{key}: {text.removesuffix('...' + chr(10)).strip()}")
    return write_text(file, "\n".join(lines) + "\n")
