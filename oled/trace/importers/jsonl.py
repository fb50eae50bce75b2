"""Generic JSONL: a line for each (layer, token) with its experts, as several tools write it.

`{"layer_idx": 3, "token_idx": 17, "selected_ids": [5, 9], "gate_weights": [0.6, 0.4]}`, in any
order. Every token is a forward of its own, in the order of `token_idx`. `gate_weights` may be
missing; `weights=none` drops them where they are scores of the selection and not what was applied.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields
from oled.trace.importers.cells import GAPS, Cells, source_of_cells
from oled.trace.importers.facts import FACTS
from oled.trace.importers.json_lines import json_lines
from oled.trace.importers.source import Format, Source
from oled.trace.importers.weights import WEIGHTS
from oled.trace.options import Options
from oled.trace.schema import NO_EXPERT
from oled.types import Array

NAME = "jsonl"
LACKS = ("confidence", "requests", "phases", "token_ids")
OPTIONS = {**FACTS, **WEIGHTS, **GAPS}
MAX_LINE = 1 << 20
BLOCK = 1 << 15  # lines that are turned into arrays at once


def read(path: Path, options: Options) -> Source:
    """Read all tokens as request 0."""
    return source_of_cells(NAME, path, _read(path), options, LACKS)


FORMAT = Format(
    NAME,
    "a JSON line for each (layer, token): layer_idx, token_idx, selected_ids, gate_weights",
    read,
    LACKS,
    OPTIONS,
)


def _read(path: Path) -> Cells:
    blocks: list[Cells] = []
    lines: list[JsonFields] = []
    for line in json_lines(path, MAX_LINE):
        lines.append(line)
        if len(lines) == BLOCK:
            blocks.append(_block(lines))
            lines = []
    if lines:
        blocks.append(_block(lines))
    if len({block.weights is None for block in blocks}) > 1:
        raise TraceError(f"{path}: some lines have gate_weights and others do not")
    width = max(block.ids.shape[1] for block in blocks)
    weights = [_wide(block.weights, width, 0) for block in blocks if block.weights is not None]
    return Cells(
        np.concatenate([block.layer for block in blocks]),
        np.concatenate([block.token for block in blocks]),
        np.concatenate([_wide(block.ids, width, NO_EXPERT) for block in blocks]),
        np.concatenate(weights) if weights else None,
    )


def _wide(values: Array, width: int, fill: int) -> Array:
    missing = width - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill)


def _block(lines: list[JsonFields]) -> Cells:
    experts = [line.items("selected_ids", int) for line in lines]
    width = max(map(len, experts))
    ids = np.full((len(lines), max(width, 1)), NO_EXPERT, dtype=np.uint16)
    with_weights = lines[0].has("gate_weights")
    weights = np.zeros(ids.shape, dtype=np.float32)
    for row, (line, chosen) in enumerate(zip(lines, experts, strict=True)):
        if not chosen or not 0 <= min(chosen) <= max(chosen) < NO_EXPERT:
            raise TraceError(f"{line.where}: selected_ids {list(chosen)[:8]} hold no expert ids")
        ids[row, : len(chosen)] = chosen
        if line.has("gate_weights") != with_weights:
            raise TraceError(f"{line.where}: some lines have gate_weights and others do not")
        if with_weights:
            weights[row, : len(chosen)] = _weights(line, len(chosen))
    return Cells(
        np.array([_small(line, "layer_idx", 1 << 16) for line in lines], dtype=np.int32),
        np.array([_small(line, "token_idx", 1 << 32) for line in lines], dtype=np.int64),
        ids,
        weights if with_weights else None,
    )


def _weights(line: JsonFields, count: int) -> tuple[float, ...]:
    values = line.get("gate_weights", list)
    if len(values) != count or any(type(value) not in (int, float) for value in values):
        raise TraceError(f"{line.where}: gate_weights must be {count} numbers")
    found = tuple(map(float, values))
    if not all(0 <= value < float("inf") for value in found):
        raise TraceError(f"{line.where}: a gate weight is negative or not finite")
    return found


def _small(line: JsonFields, key: str, limit: int) -> int:
    value = line.get(key, int)
    if not 0 <= value < limit:
        raise TraceError(f"{line.where}: '{key}' must be from 0 to {limit - 1}")
    return value
