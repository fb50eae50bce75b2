"""Recordings of one row for each (layer, token), in any order: one request, a forward a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.importers.facts import Facts
from oled.trace.importers.records import plain_record, row_tokens
from oled.trace.importers.source import Source, provenance
from oled.trace.importers.weights import weight_kind
from oled.trace.limits import require_memory
from oled.trace.manifest import Gap, Kept
from oled.trace.options import Options
from oled.trace.schema import NO_EXPERT, ForwardRecord, Phase, WeightKind
from oled.types import ExpertIds, Floats, Ints

GAPS = {"gaps": "true: tokens without a row of some layer are meant so (false)"}
"""The option of every importer of such rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """All rows, as arrays."""

    layer: NDArray[np.int32]  # [R]
    token: Ints  # [R]
    ids: ExpertIds  # [R, k]
    weights: Floats | None  # [R, k]


def source_of_cells(
    name: str, path: Path, cells: Cells, options: Options, lacks: tuple[str, ...]
) -> Source:
    """Make a source of all rows as request 0, tokens in the order of their numbers."""
    facts = Facts.of(options)
    rows = _sorted(path, cells)
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
    if kind is WeightKind.NONE:
        lacks = ("weights", *lacks)
    about = provenance(name, path)
    manifest = facts.manifest(geometry, about, lacks, weight_kind=kind, weight_sum=total, gaps=gaps)
    return Source(manifest, _records(rows, layers, tokens, top_k, kind is not WeightKind.NONE))


def _sorted(path: Path, rows: Cells) -> Cells:
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
    return Cells(layer, token, rows.ids[order], weights)


def _records(
    rows: Cells,
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
