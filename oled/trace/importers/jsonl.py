"""Generic JSONL: a line for each (layer, token) with its experts, as several tools write it.

`{"layer_idx": 3, "token_idx": 17, "selected_ids": [5, 9], "gate_weights": [0.6, 0.4]}`, in any
order. Every token is a forward of its own, in the order of `token_idx`. `gate_weights` may be
missing; `weights=none` drops them where they are scores of the selection and not what was applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields, parse_json
from oled.trace.importers.arrays import damage
from oled.trace.importers.facts import FACTS, Facts
from oled.trace.importers.records import plain_record, row_tokens
from oled.trace.importers.source import Format, Source, provenance
from oled.trace.importers.weights import WEIGHTS, weight_kind
from oled.trace.limits import require_memory
from oled.trace.manifest import Gap, Kept
from oled.trace.options import Options
from oled.trace.schema import NO_EXPERT, ForwardRecord, Phase, WeightKind
from oled.types import Array, ExpertIds, Floats, Ints

NAME = "jsonl"
LACKS = ("confidence", "requests", "phases", "token_ids")
OPTIONS = {
    **FACTS,
    **WEIGHTS,
    "gaps": "true: tokens without a row of some layer are meant so (false)",
}
MAX_LINE = 1 << 20
BLOCK = 1 << 15  # lines that are turned into arrays at once


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """All lines, as arrays."""

    layer: NDArray[np.int32]  # [R]
    token: Ints  # [R]
    ids: ExpertIds  # [R, k]
    weights: Floats | None  # [R, k]


def read(path: Path, options: Options) -> Source:
    """Read all tokens as request 0."""
    facts = Facts.of(options)
    rows = _sorted(path, _read(path))
    layers = np.unique(rows.layer)
    top_k = facts.require_top_k(None if facts.top_k else rows.ids.shape[1])
    if top_k < rows.ids.shape[1]:
        raise TraceError(f"{path}: rows of {rows.ids.shape[1]} experts, top_k={top_k} was named")
    geometry = facts.geometry(tuple(layers.tolist()), top_k)
    tokens, place = np.unique(rows.token, return_inverse=True)
    require_memory(len(layers) * len(tokens), f"{path}: {len(layers)} layers, {len(tokens)} tokens")
    present = np.zeros((len(layers), len(tokens)), dtype=bool)
    present[np.searchsorted(layers, rows.layer), place] = True
    gaps = tuple(
        Gap(int(layers[at]), Phase.DECODE, Kept.SOME, "the source has no line")
        for at in np.flatnonzero(~present.all(axis=1))
    )
    if gaps and not options.flag("gaps", False):
        at, token = np.argwhere(~present)[0]
        raise TraceError(
            f"{path}: token {tokens[token]} has no line of layer {layers[at]}: cut off? "
            f"gaps=true takes it as it is"
        )
    kind, total = weight_kind(path, options, rows.weights, "the lines have no gate_weights")
    lacks = LACKS if kind is not WeightKind.NONE else ("weights", *LACKS)
    about = provenance(NAME, path)
    manifest = facts.manifest(geometry, about, lacks, weight_kind=kind, weight_sum=total, gaps=gaps)
    return Source(manifest, _records(rows, layers, tokens, top_k, kind is not WeightKind.NONE))


FORMAT = Format(
    NAME,
    "a JSON line for each (layer, token): layer_idx, token_idx, selected_ids, gate_weights",
    read,
    LACKS,
    OPTIONS,
)


def _read(path: Path) -> _Rows:
    blocks: list[_Rows] = []
    lines: list[JsonFields] = []
    with damage(path, "JSON lines"), path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE:
                raise TraceError(f"{where}: longer than {MAX_LINE} bytes")
            if line.strip():
                lines.append(JsonFields(parse_json(line.decode("utf-8"), where), where))
            if len(lines) == BLOCK:
                blocks.append(_block(lines))
                lines = []
    if lines:
        blocks.append(_block(lines))
    if not blocks:
        raise TraceError(f"{path}: holds no lines")
    if len({block.weights is None for block in blocks}) > 1:
        raise TraceError(f"{path}: some lines have gate_weights and others do not")
    width = max(block.ids.shape[1] for block in blocks)
    weights = [_wide(block.weights, width, 0) for block in blocks if block.weights is not None]
    return _Rows(
        np.concatenate([block.layer for block in blocks]),
        np.concatenate([block.token for block in blocks]),
        np.concatenate([_wide(block.ids, width, NO_EXPERT) for block in blocks]),
        np.concatenate(weights) if weights else None,
    )


def _wide(values: Array, width: int, fill: int) -> Array:
    missing = width - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill)


def _block(lines: list[JsonFields]) -> _Rows:
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
    return _Rows(
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


def _sorted(path: Path, rows: _Rows) -> _Rows:
    """Sort by token, then by layer; refuse a cell that is there twice."""
    order = np.lexsort((rows.layer, rows.token))
    layer, token = rows.layer[order], rows.token[order]
    twice = (layer[1:] == layer[:-1]) & (token[1:] == token[:-1])
    if twice.any():
        at = int(np.argmax(twice))
        raise TraceError(
            f"{path}: two lines for layer {layer[at]}, token {token[at]}: several requests in one "
            f"file? Import them one by one and `oled merge` them"
        )
    weights = None if rows.weights is None else rows.weights[order]
    return _Rows(layer, token, rows.ids[order], weights)


def _records(
    rows: _Rows,
    layers: NDArray[np.int32],
    tokens: Ints,
    top_k: int,
    with_weights: bool,
) -> Iterator[ForwardRecord]:
    begins = np.searchsorted(rows.token, np.append(tokens, tokens[-1] + 1)).tolist()
    places = np.searchsorted(layers, rows.layer)
    for number, token in enumerate(tokens.tolist()):
        here = slice(begins[number], begins[number + 1])
        place = places[here]
        ids = np.full((len(layers), 1, top_k), NO_EXPERT, dtype=np.uint16)
        weights = np.zeros(ids.shape, dtype=np.float32)
        present = np.zeros((len(layers), 1), dtype=bool)
        width = rows.ids.shape[1]
        ids[place, 0, :width], present[place] = rows.ids[here], True
        if with_weights and rows.weights is not None:
            weights[place, 0, :width] = rows.weights[here]
        yield plain_record(
            number,
            Phase.DECODE,
            layers,
            ids,
            weights=weights,
            context=token,
            produced=1,
            row_tokens=row_tokens(present),
        )
