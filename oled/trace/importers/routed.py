"""Arrays of routed experts [tokens, layers, k], as serving engines return them with a response.

Their buffers start at zero, so that dense layers and rows never written look like expert 0. With k
of two or more a row of zeros can not be real (no token takes an expert twice): a layer of nothing
but such rows is dense, a token of them was not routed here, and a layer that has them for some
tokens only gets a declared gap. With k = 1 a zero is a zero: dense layers must then be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.importers.facts import FACTS, Facts
from oled.trace.importers.request_rows import Ids, RequestRows, gaps_of, records_of
from oled.trace.importers.source import Source, provenance
from oled.trace.options import Options
from oled.trace.schema import NO_EXPERT
from oled.types import Bools, Ints

LACKS = ("weights", "confidence", "passes")
OPTIONS = {
    **FACTS,
    "prompt": "tokens of the prompt, where the file does not say; else every token is a forward",
}


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """One request's rows."""

    name: str  # for messages
    ids: Ids  # [tokens, layers, k]
    prompt: int | None = None  # tokens of the prompt among them
    token_ids: Sequence[int] | None = None
    context: int = 0  # tokens before the first row


def source_of(name: str, path: Path, requests: Sequence[Routes], options: Options) -> Source:
    """Make a source of such requests, one after the other."""
    if not requests:
        raise TraceError(f"{path}: holds no routed experts")
    facts = Facts.of(options)
    found = [_validated(path, routes) for routes in requests]
    if len({ids.shape[1:] for ids in found}) > 1:
        raise TraceError(f"{path}: its arrays differ in layers or width")
    found = _without_unused_slots(path, found, facts)
    top_k = found[0].shape[2]
    layers = np.array(facts.layer_ids(found[0].shape[1]))
    written = [_written(ids) for ids in found]
    moe = _moe_layers(path, layers, written, found, facts)
    ids = [cube[:, moe] for cube in found]
    present = [cube[:, moe] for cube in written]
    _refuse_half_rows(path, requests, ids, present, layers[moe])
    geometry = facts.geometry(tuple(layers[moe].tolist()), top_k, num_layers=len(layers))
    prompt = options.integer("prompt")
    plans = [
        _rows_of(routes, cube, there, prompt)
        for routes, cube, there in zip(requests, ids, present, strict=True)
    ]
    lost = sum(int((~there.any(axis=1)).sum()) for there in present)
    lacks = LACKS if all(plan.prompt is not None for plan in plans) else (*LACKS, "phases")
    if any(plan.token_ids is None for plan in plans):
        lacks = (*lacks, "token_ids")
    manifest = facts.manifest(
        geometry,
        {**provenance(name, path), "unwritten_tokens": lost},
        lacks,
        decode={"mode": "autoregressive"},
        gaps=tuple(gaps_of(plans, geometry.moe_layers, "rows that the engine never wrote")),
    )
    return Source(manifest, records_of(plans, np.array(geometry.moe_layers)))


def _validated(path: Path, routes: Routes) -> Ids:
    ids = routes.ids
    if ids.ndim != 3 or 0 in ids.shape or ids.dtype.kind not in "iu":
        raise TraceError(
            f"{path}: {routes.name}: {ids.dtype}{list(ids.shape)} must be integers [tokens, "
            f"layers, k]"
        )
    if int(ids.min()) < -1 or int(ids.max()) >= NO_EXPERT:
        token, layer, slot = np.argwhere((ids < -1) | (ids >= NO_EXPERT))[0]
        raise TraceError(
            f"{path}: {routes.name}: token {token}, layer {layer}: expert id "
            f"{ids[token, layer, slot]} is neither -1 nor in 0..{NO_EXPERT - 1}"
        )
    return ids.astype(np.int32)


def _without_unused_slots(path: Path, found: list[Ids], facts: Facts) -> list[Ids]:
    """Drop columns that are never used: engines have wider buffers than some models need."""
    width = found[0].shape[2]
    used = np.array([any((ids[..., slot] > 0).any() for ids in found) for slot in range(width)])
    marked = np.array([all((ids[..., slot] < 0).all() for ids in found) for slot in range(width)])
    top_k = facts.top_k
    if top_k is None:
        top_k = width - int(np.argmin(marked[::-1])) if not marked.all() else width
    if top_k > width or used[top_k:].any():
        raise TraceError(f"{path}: rows hold {width} experts, top_k={top_k} does not fit them")
    return [ids[..., :top_k] for ids in found]


def _written(ids: Ids) -> Bools:
    """Return which (token, layer) rows are real, for they name expert 0 at most once."""
    return np.asarray((ids > 0).any(axis=2) | ((ids == 0).sum(axis=2) == 1))


def _moe_layers(
    path: Path,
    layers: Ints,
    written: Sequence[Bools],
    found: Sequence[Ids],
    facts: Facts,
) -> Bools:
    """Return which places of the layer axis have experts: as named, else as the rows show."""
    seen = np.array([cube.any(axis=0) for cube in written]).any(axis=0)
    if facts.moe_layers is not None:
        named = np.isin(layers, facts.moe_layers)
        nonzero = np.array([(ids > 0).any(axis=(0, 2)) for ids in found]).any(axis=0)
        for wrong, text in (
            (nonzero & ~named, "was named dense, but has expert ids"),
            (named & ~seen, "has no row: it was not captured"),
        ):
            if wrong.any():
                raise TraceError(f"{path}: layer {layers[wrong][0]} {text}")
        return np.asarray(named)
    if found[0].shape[2] == 1:
        silent = ~np.array([(ids > 0).any(axis=(0, 2)) for ids in found]).any(axis=0)
        if silent.any():
            raise TraceError(
                f"{path}: layer {layers[silent][0]} is all zeros: dense, or always expert 0? Say "
                f"moe_layers=… or model=NAME"
            )
    if not seen.any():
        raise TraceError(f"{path}: every id is zero: the router was not captured")
    return np.asarray(seen)


def _refuse_half_rows(
    path: Path,
    requests: Sequence[Routes],
    ids: Sequence[Ids],
    present: Sequence[Bools],
    layers: Ints,
) -> None:
    """Refuse a row with an expert twice: it was written in part only."""
    for routes, cube, there in zip(requests, ids, present, strict=True):
        ordered = np.sort(cube, axis=2)
        twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(axis=2)
        if (twice & there).any():
            token, layer = np.argwhere(twice & there)[0]
            raise TraceError(
                f"{path}: {routes.name}: token {token}, layer {layers[layer]}: ids "
                f"{cube[token, layer].tolist()} name an expert twice: not written whole, or is "
                f"top_k smaller?"
            )


def _rows_of(routes: Routes, ids: Ids, present: Bools, prompt: int | None) -> RequestRows:
    """Return a request's rows; what its file says of the prompt comes before the option."""
    tokens = None
    if routes.token_ids is not None and len(routes.token_ids) >= len(ids):
        tokens = np.array(routes.token_ids[: len(ids)], dtype=np.int64)
    return RequestRows.of(
        ids,
        present,
        prompt=prompt if routes.prompt is None else routes.prompt,
        token_ids=tokens,
        context=routes.context,
    )
