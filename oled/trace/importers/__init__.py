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
    routed,
    router_logits,
    sglang_dump,
    sglang_routed_experts,
    sglang_tokens,
    vllm_routed_experts,
)
from oled.trace.importers.source import LACKS, Format, Source
from oled.trace.options import OptionError, Options
from oled.trace.parts import new_folder
from oled.trace.writer import TraceWriter

IMPORTERS: dict[str, Format] = {
    "sglang_dump": Format(
        "SGLang's expert distribution recorder: per_token, per_pass, stat (.pt, or a folder)",
        sglang_dump.read,
        sglang_tokens.LACKS,
        sglang_dump.OPTIONS,
        sglang_dump.SUFFIXES,
    ),
    "sglang_routed_experts": Format(
        "SGLang's return_routed_experts: ids [tokens, layers, k] (.npy, .npz, .json, .jsonl)",
        sglang_routed_experts.read,
        routed.LACKS,
        routed.OPTIONS,
    ),
    "vllm_routed_experts": Format(
        "vLLM's routed experts: ids [tokens, layers, k] (.npy, .npz, .json, .jsonl)",
        vllm_routed_experts.read,
        routed.LACKS,
        routed.OPTIONS,
    ),
    "bigmoeonedge": Format(
        "route_trace v1 of BigMoeOnEdge: CSV with ids, weights and bytes of each layer's experts",
        bigmoeonedge.read,
        bigmoeonedge.LACKS,
    ),
    "cacheable_by_design": Format(
        "NPZ of cacheable-by-design: ids of every token in windows of a text",
        cacheable_by_design.read,
        cacheable_by_design.LACKS,
    ),
    "llama_cpp": Format(
        "llama.cpp's moe-trace: CSV of layer,expert in the order of execution",
        llama_cpp.read,
        llama_cpp.LACKS,
        llama_cpp.OPTIONS,
    ),
    "jsonl": Format(
        "a JSON line for each (layer, token): layer_idx, token_idx, selected_ids, gate_weights",
        jsonl.read,
        jsonl.LACKS,
        jsonl.OPTIONS,
    ),
    "router_logits": Format(
        "transformers' router_logits: per layer [batch * seq, experts] (.pt, .npz, .safetensors)",
        router_logits.read,
        router_logits.LACKS,
        router_logits.OPTIONS,
        router_logits.SUFFIXES,
    ),
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
