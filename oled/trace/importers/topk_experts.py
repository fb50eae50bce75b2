"""JSONL of batches: a line for each (batch, layer), `topk_experts` [tokens][k] on it.

`{"layer": 0, "batch_id": 12, "topk_experts": [[3, 7], [2, 5]]}`; a flat list is one token. A batch
is a forward, in the order of first lines; without `batch_id` it begins where the layer does not
grow. `topk_weights` of the same shape and `request_id` may be there, on all lines or on none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields, brief
from oled.trace.importers.cells import GAPS
from oled.trace.importers.facts import FACTS, Facts
from oled.trace.importers.json_lines import json_lines
from oled.trace.importers.records import plain_record, row_tokens
from oled.trace.importers.source import Format, Source, provenance
from oled.trace.importers.weights import WEIGHTS, weight_kind
from oled.trace.limits import MAX_LAYERS
from oled.trace.manifest import Gap, Kept
from oled.trace.options import Options
from oled.trace.schema import MAX_TOKENS, NO_EXPERT, ForwardRecord, Phase, WeightKind
from oled.types import Array, Bools

NAME = "topk_experts"
LACKS = ("confidence", "phases", "token_ids", "positions")
MAX_LINE = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Rows of one forward, by layer."""

    name: str  # for messages
    request: Any  # None unknown
    ids: dict[int, Array] = field(default_factory=dict)  # [T, k] of each layer
    weights: dict[int, Array] = field(default_factory=dict)  # [T, k] of each layer

    @property
    def tokens(self) -> int:
        """Return how many tokens each layer has."""
        return len(next(iter(self.ids.values())))


def read(path: Path, options: Options) -> Source:
    """Read one forward a batch."""
    facts = Facts.of(options)
    batches = _batches(path)
    layers = sorted({layer for one in batches for layer in one.ids})
    top_k = facts.require_top_k(next(iter(batches[0].ids.values())).shape[1])
    geometry = facts.geometry(tuple(layers), top_k)
    present = np.array([[layer in one.ids for layer in layers] for one in batches])
    gaps = _gaps(path, batches, layers, present, options.flag("gaps", False))
    weighted = bool(batches[0].weights)
    everything = [array for one in batches for array in one.weights.values()]
    joined = np.concatenate(everything) if weighted else None
    kind, total = weight_kind(path, options, joined, "the lines have no topk_weights")
    unknown = {
        "weights": kind is WeightKind.NONE,
        "requests": batches[0].request is None,
        "passes": batches[0].request is not None,
    }
    manifest = facts.manifest(
        geometry,
        provenance(NAME, path),
        (*(word for word, lacking in unknown.items() if lacking), *LACKS),
        weight_kind=kind,
        weight_sum=total,
        gaps=gaps,
    )
    return Source(manifest, _records(batches, layers, top_k, kind is not WeightKind.NONE))


FORMAT = Format(
    NAME,
    "a JSON line for each (batch, layer): layer, batch_id, topk_experts, topk_weights",
    read,
    LACKS,
    {**FACTS, **WEIGHTS, **GAPS},
)


def _batches(path: Path) -> list[_Batch]:
    """Return the batches in the order of their first lines; all rows have the same width."""
    found: dict[Any, _Batch] = {}
    first: JsonFields | None = None
    number, before = -1, MAX_LAYERS
    width = 0
    for line in json_lines(path, MAX_LINE):
        first = first or line
        for key in ("batch_id", "request_id", "topk_weights"):
            if line.has(key) != first.has(key):
                raise TraceError(f"{line.where}: some lines have {key} and others do not")
        layer = line.get("layer", int)
        if not 0 <= layer < MAX_LAYERS:
            raise TraceError(f"{line.where}: layer {layer} is not in 0..{MAX_LAYERS - 1}")
        number, before = number + (layer <= before), layer
        request, name = _name(line, "request_id"), _name(line, "batch_id")
        name = number if name is None else name
        batch = found.setdefault((request, name), _Batch(f"batch {name!r:.40}", request))
        _add(batch, layer, line)
        shape = batch.ids[layer].shape
        width = width or shape[1]
        if shape != (batch.tokens, width):
            raise TraceError(
                f"{line.where}: topk_experts {list(shape)} of layer {layer}, {batch.name} has "
                f"{batch.tokens} tokens of {width} experts"
            )
    return list(found.values())


def _name(line: JsonFields, key: str) -> int | str | None:
    value = line.data.get(key)
    if value is not None and type(value) not in (int, str):
        raise TraceError(f"{line.where}: {key} {brief(value)} is no number and no name")
    return value


def _add(batch: _Batch, layer: int, line: JsonFields) -> None:
    if layer in batch.ids:
        raise TraceError(f"{line.where}: {batch.name} has layer {layer} twice")
    ids = _matrix(line, "topk_experts", "iu", "whole numbers")
    if len(ids) > MAX_TOKENS:
        raise TraceError(
            f"{line.where}: {len(ids)} tokens; a forward holds at most {MAX_TOKENS}: split it"
        )
    ordered = np.sort(ids, axis=1)
    wrong = (ids < 0).any(axis=1) | (ids >= NO_EXPERT).any(axis=1)
    wrong |= (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if wrong.any():
        token = int(np.argmax(wrong))
        raise TraceError(
            f"{line.where}: layer {layer}, token {token}: {ids[token].tolist()!r:.60} are not ids "
            f"of different experts"
        )
    batch.ids[layer] = ids.astype(np.uint16)
    if line.has("topk_weights"):
        weights = _matrix(line, "topk_weights", "iuf", "numbers")
        if weights.shape != ids.shape:
            raise TraceError(
                f"{line.where}: topk_weights {list(weights.shape)} and topk_experts "
                f"{list(ids.shape)} differ in shape"
            )
        with np.errstate(over="ignore"):
            batch.weights[layer] = weights.astype(np.float32)
        if not (np.isfinite(batch.weights[layer]) & (weights >= 0)).all():
            raise TraceError(f"{line.where}: a gate weight is negative or not finite")


def _matrix(line: JsonFields, key: str, kinds: str, words: str) -> Array:
    """Return a list of equally long lists, or one list, as [T, k]."""
    value = line.get(key, list)
    try:
        array = np.array(value)
    except ValueError:
        raise TraceError(f"{line.where}: the lists of {key} differ in length") from None
    if array.dtype.kind not in kinds or array.ndim not in (1, 2) or not array.size:
        raise TraceError(
            f"{line.where}: {key} must hold {words}, a list for each token; found {brief(value)}"
        )
    return array.reshape(-1, array.shape[-1])


def _gaps(
    path: Path, batches: list[_Batch], layers: list[int], present: Bools, meant: bool
) -> tuple[Gap, ...]:
    """Return the layers that some batch lacks, if that is meant."""
    if not present.all() and not meant:
        number, place = np.argwhere(~present)[0]
        raise TraceError(
            f"{path}: {batches[number].name} has no line of layer {layers[place]}: cut off? "
            f"gaps=true takes it as it is"
        )
    lost = np.flatnonzero(~present.all(axis=0))
    reason = "the source has no line"
    return tuple(Gap(layers[place], Phase.DECODE, Kept.SOME, reason) for place in lost)


def _records(
    batches: list[_Batch], layers: list[int], top_k: int, weighted: bool
) -> Iterator[ForwardRecord]:
    requests: dict[Any, int] = {}
    context: dict[Any, int] = {}
    for pass_id, one in enumerate(batches):
        request = requests.setdefault(one.request, len(requests))
        before = context.get(request, 0)
        context[request] = before + one.tokens
        empty = np.full((one.tokens, top_k), NO_EXPERT, dtype=np.uint16)
        ids = np.array([one.ids.get(layer, empty) for layer in layers])
        zeros = np.zeros((one.tokens, top_k), dtype=np.float32)
        weights = (
            np.array([one.weights.get(layer, zeros) for layer in layers]) if weighted else None
        )
        present = np.array([[layer in one.ids] * one.tokens for layer in layers])
        yield plain_record(
            pass_id,
            Phase.DECODE,
            np.array(layers),
            ids,
            request=request,
            weights=weights,
            context=before,
            produced=one.tokens,
            row_tokens=row_tokens(present),
        )
