"""Traces from other tools' recordings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oled.errors import nearest
from oled.trace.errors import TraceError
from oled.trace.importers import (
    bigmoeonedge,
    cacheable_by_design,
    jsonl,
    llama_cpp,
    plain_csv,
    router_logits,
    sglang_dump,
    sglang_routed_experts,
    token_arrays,
    topk_experts,
    vllm_routed_experts,
)
from oled.trace.importers.source import LACKS, Format, Source
from oled.trace.options import OptionError, Options
from oled.trace.parts import new_folder
from oled.trace.writer import TraceWriter

IMPORTERS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (
        sglang_dump,
        sglang_routed_experts,
        vllm_routed_experts,
        token_arrays,
        bigmoeonedge,
        cacheable_by_design,
        llama_cpp,
        plain_csv,
        topk_experts,
        jsonl,
        router_logits,
    )
}
"""By name. What a format lacks in any case; a file may lack more, and its trace says so."""


def read_source(name: str, source: str | Path, options: Mapping[str, Any] | None = None) -> Source:
    """Read a recording in one of the known formats."""
    if name not in IMPORTERS:
        raise OptionError(f"there is no format '{name}' to import; {nearest(name, IMPORTERS)}")
    found = IMPORTERS[name]
    given = Options(options or {}, found.options, f"import {name}")
    path = Path(source)
    if not path.exists():
        raise TraceError(f"{path}: no such file")
    if not path.is_file() and not (path.is_dir() and found.suffixes):
        raise TraceError(f"{path}: not a file{' or a folder' if found.suffixes else ''}")
    return found.read(path, given)


def import_trace(
    name: str,
    source: str | Path,
    destination: str | Path,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a recording as a trace folder, which appears when it is whole."""
    found = read_source(name, source, options)
    with new_folder(destination) as place, TraceWriter(place, found.manifest) as writer:
        for record in found.records:
            writer.append(record)
    return Path(destination)


__all__ = ["IMPORTERS", "LACKS", "Format", "Source", "import_trace", "read_source"]
