"""Traces for other tools: each exporter streams a trace into one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oled.errors import nearest
from oled.trace.exporters.cachesim import to_libcachesim_csv, to_oracle_general
from oled.trace.exporters.hot import to_hot_experts
from oled.trace.exporters.table import to_csv, to_parquet
from oled.trace.options import OptionError, Options
from oled.trace.parts import new_file
from oled.trace.stream import TraceStream


@dataclass(frozen=True, slots=True)
class Exporter:
    """A format that traces can be written in."""

    summary: str
    write: Callable[[TraceStream, Path, Options], None]
    options: Mapping[str, str]  # name: what it is


_ACCESS = {"access": "step (each active expert once a layer-step) or token (each token and slot)"}

EXPORTERS: dict[str, Exporter] = {
    "parquet": Exporter("the long view: one row per (forward, layer, token, slot)", to_parquet, {}),
    "csv": Exporter("the long view as text", to_csv, {}),
    "oracle_general": Exporter(
        "libCacheSim's oracleGeneral: 24-byte requests with the next access",
        to_oracle_general,
        _ACCESS,
    ),
    "libcachesim_csv": Exporter(
        "libCacheSim's CSV: time,obj_id,obj_size", to_libcachesim_csv, _ACCESS
    ),
    "hot_experts": Exporter(
        "JSON: the experts of each layer, most used first",
        to_hot_experts,
        {"top": "how many of each layer (all)"},
    ),
}


def export_trace(
    name: str,
    trace: str | Path,
    destination: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    allow_partial: bool = False,
) -> Path:
    """Write a trace folder as one file, which appears when it is whole."""
    if name not in EXPORTERS:
        raise OptionError(f"there is no format '{name}' to export; {nearest(name, EXPORTERS)}")
    exporter = EXPORTERS[name]
    given = Options(options or {}, exporter.options, f"export {name}")
    stream = TraceStream.open(trace, allow_partial=allow_partial)
    with new_file(destination) as path:
        exporter.write(stream, path, given)
    return Path(destination)


__all__ = ["EXPORTERS", "Exporter", "export_trace"]
