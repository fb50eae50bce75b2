"""Traces from other tools' recordings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oled.errors import nearest
from oled.trace.errors import TraceError
from oled.trace.importers import bigmoeonedge, cacheable_by_design
from oled.trace.importers.source import Source
from oled.trace.writer import TraceWriter

IMPORTERS: dict[str, tuple[Callable[[Path], Source], str]] = {
    "bigmoeonedge": (
        bigmoeonedge.read,
        "route_trace v1 of BigMoeOnEdge: CSV with ids, weights and bytes of each layer's experts",
    ),
    "cacheable_by_design": (
        cacheable_by_design.read,
        "NPZ of cacheable-by-design: ids of every token in windows of a text, without weights",
    ),
}
"""Name of a format: its reader and one line about it."""


def read_source(name: str, source: str | Path) -> Source:
    """Read a recording in one of the known formats."""
    if name not in IMPORTERS:
        raise TraceError(f"there is no format '{name}' to import; {nearest(name, IMPORTERS)}")
    path = Path(source)
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    return IMPORTERS[name][0](path)


def import_trace(name: str, source: str | Path, destination: str | Path) -> Path:
    """Write a recording as a trace folder."""
    found = read_source(name, source)
    with TraceWriter(destination, found.manifest) as writer:
        for record in found.records:
            writer.append(record)
    return Path(destination)


__all__ = ["IMPORTERS", "Source", "import_trace", "read_source"]
