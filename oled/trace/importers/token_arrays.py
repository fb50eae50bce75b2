"""NPZ of arrays by token: what several requests routed, one token after the other.

`ids` int [T, L, k] (a row of -1: missing at the origin), `start` int [P + 1] (where each request
begins and ends in T), `layers` int [L] (absolute ids), `n_experts`; `phase` [T] (0 prompt, 1
generated), `w` float [T, L, k] (gate weights) and `meta` (JSON text) may be missing. A request's
prompt is one forward, each generated token is one. Of `meta`, `model` names the model, and
`first_pos` in each entry of `prompts` is the position of the request's first row.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import parse_json
from oled.trace.importers.arrays import read_npz
from oled.trace.importers.facts import FACTS, Facts
from oled.trace.importers.request_rows import Ids, RequestRows, gaps_of, records_of
from oled.trace.importers.source import Format, Source, provenance
from oled.trace.importers.weights import WEIGHTS, weight_kind
from oled.trace.limits import MAX_LAYERS
from oled.trace.options import Options
from oled.trace.schema import NO_EXPERT, WeightKind
from oled.types import Array, Bools, Floats, Ints

NAME = "token_arrays"
LACKS = ("confidence", "passes", "token_ids")
REQUIRED = ("ids", "start", "layers", "n_experts")
KNOWN = (*REQUIRED, "phase", "w", "meta")


def read(path: Path, options: Options) -> Source:
    """Read each request between two starts."""
    facts = Facts.of(options)
    arrays = _arrays(path)
    experts = _experts(path, arrays["n_experts"])
    layers = _layers(path, arrays["layers"])
    ids, present = _ids(path, arrays["ids"], layers, experts)
    start = _start(path, arrays["start"], len(ids))
    phase = _phase(path, arrays.get("phase"), start, len(ids))
    weights = _weights(path, arrays.get("w"), layers, ids, present)
    meta = _meta(path, arrays.get("meta"))
    first = _first_positions(path, meta, len(start) - 1)
    kind, total = weight_kind(
        path, options, None if weights is None else weights[present], "there is no array 'w'"
    )
    requests = []
    for number, (begin, end) in enumerate(pairwise(start.tolist())):
        here = slice(begin, end)
        one = RequestRows.of(
            ids[here],
            present[here],
            prompt=None if phase is None else int((phase[here] == 0).sum()),
            context=first[number] if first else 0,
            weights=None if weights is None or kind is WeightKind.NONE else weights[here],
        )
        if not len(one.ids):
            raise TraceError(f"{path}: request {number} has no row of any token: leave it out")
        requests.append(one)
    geometry = facts.geometry(
        tuple(layers.tolist()), facts.require_top_k(ids.shape[2]), experts=experts
    )
    about: dict[str, Any] = {**provenance(NAME, path), "meta": meta}
    model = {"id": meta.get("model", facts.model or "unknown"), "revision": None, "dtype": None}
    manifest = facts.manifest(
        geometry,
        {**about, "missing_tokens": int((~present.any(axis=1)).sum())},
        _lacks(kind, requests, positions=bool(first)),
        weight_kind=kind,
        weight_sum=total,
        model=model,
        decode={"mode": "autoregressive"},
        gaps=tuple(gaps_of(requests, geometry.moe_layers, "rows that the origin lacks")),
    )
    return Source(manifest, records_of(requests, layers))


FORMAT = Format(
    NAME,
    "NPZ of ids, w, start, phase, layers: requests as arrays [tokens, layers, k]",
    read,
    LACKS,
    {**FACTS, **WEIGHTS},
)


def _lacks(kind: WeightKind, requests: list[RequestRows], *, positions: bool) -> tuple[str, ...]:
    """Return what this file lacks; without phases it is not known whether prompts are in it."""
    phases = all(one.prompt is not None for one in requests)
    no_prompt = phases and any(one.prompt == 0 for one in requests)
    lacking = {
        "weights": kind is WeightKind.NONE,
        "phases": not phases,
        "prefill": no_prompt,
        "positions": no_prompt and not positions,
    }
    return (*(word for word, lacks in lacking.items() if lacks), *LACKS)


def _arrays(path: Path) -> dict[str, Array]:
    arrays = read_npz(path)
    for name in REQUIRED:
        if name not in arrays:
            raise TraceError(f"{path}: '{name}' is missing; expected {', '.join(KNOWN)}")
    for name in (*REQUIRED, "phase"):
        if name in arrays and arrays[name].dtype.kind not in "iu":
            raise TraceError(f"{path}: {name} are {arrays[name].dtype}, not integers")
    return arrays


def _experts(path: Path, array: Array) -> int:
    if array.size != 1 or not 1 <= int(array.flat[0]) < NO_EXPERT:
        raise TraceError(
            f"{path}: n_experts {array.tolist()!r:.60} must be one number from 1 to {NO_EXPERT - 1}"
        )
    return int(array.flat[0])


def _layers(path: Path, array: Array) -> Ints:
    if array.ndim != 1 or not array.size:
        raise TraceError(f"{path}: layers {list(array.shape)} must be a list of layer ids")
    wrong = (array < 0) | (array >= MAX_LAYERS)
    wrong[1:] |= array[1:] <= array[:-1]
    if wrong.any():
        at = int(np.argmax(wrong))
        raise TraceError(
            f"{path}: layers[{at}] is {array[at]}: ids must ascend, from 0 to {MAX_LAYERS - 1}"
        )
    return array.astype(np.int64)


def _ids(path: Path, array: Array, layers: Ints, experts: int) -> tuple[Ids, Bools]:
    """Return ids [T, L, k] and which (token, layer) cells have a row."""
    if array.ndim != 3 or 0 in array.shape or array.shape[1] != len(layers):
        raise TraceError(
            f"{path}: ids {list(array.shape)} must be [tokens, {len(layers)} layers, k]"
        )
    wrong = (array < -1) | (array >= experts)
    if wrong.any():
        token, place, slot = np.argwhere(wrong)[0]
        raise TraceError(
            f"{path}: ids: token {token}, layer {layers[place]}: expert {array[token, place, slot]}"
            f" is neither -1 nor in 0..{experts - 1}"
        )
    ids = array.astype(np.int32)
    present: Bools = np.asarray((ids >= 0).all(axis=2))
    half = (ids >= 0).any(axis=2) & ~present
    ordered = np.sort(ids, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2) & present
    for bad, text in (
        (half, "has -1 beside experts: not written whole"),
        (twice, "names one twice"),
    ):
        if bad.any():
            token, place = np.argwhere(bad)[0]
            raise TraceError(
                f"{path}: ids: token {token}, layer {layers[place]}: the row "
                f"{ids[token, place].tolist()} {text}"
            )
    return ids, present


def _start(path: Path, array: Array, tokens: int) -> Ints:
    if array.ndim != 1 or len(array) < 2 or array[0] != 0 or array[-1] != tokens:
        raise TraceError(
            f"{path}: start must be a list from 0 to the {tokens} tokens of ids, found "
            f"{array.tolist()!r:.60}"
        )
    empty = array[1:] <= array[:-1]
    if empty.any():
        at = int(np.argmax(empty))
        raise TraceError(
            f"{path}: start: request {at} goes from token {array[at]} to {array[at + 1]}"
        )
    return array.astype(np.int64)


def _phase(path: Path, array: Array | None, start: Ints, tokens: int) -> Array | None:
    """Return phases, in which every request's prompt comes first."""
    if array is None:
        return None
    if array.shape != (tokens,):
        raise TraceError(f"{path}: phase {list(array.shape)} must have the {tokens} tokens of ids")
    if not np.isin(array, (0, 1)).all():
        token = int(np.argmin(np.isin(array, (0, 1))))
        raise TraceError(
            f"{path}: phase: token {token} is {array[token]}, neither 0 (prompt) nor 1 (generated)"
        )
    back = (array[1:] == 0) & (array[:-1] == 1)
    back[start[1:-1] - 1] = False
    if back.any():
        token = int(np.argmax(back)) + 1
        raise TraceError(
            f"{path}: phase: token {token} is of a prompt, the one before it is generated: let a "
            f"request start there"
        )
    return array


def _weights(
    path: Path, array: Array | None, layers: Ints, ids: Ids, present: Bools
) -> Floats | None:
    """Return weights, 0 where a row is missing."""
    if array is None:
        return None
    if array.dtype.kind != "f" or array.shape != ids.shape:
        raise TraceError(
            f"{path}: w {array.dtype}{list(array.shape)} must be floats {list(ids.shape)}, as ids"
        )
    with np.errstate(over="ignore"):
        weights = np.where(present[..., None], array, 0).astype(np.float32)
    wrong = ~(np.isfinite(weights) & (weights >= 0)).all(axis=2)
    if wrong.any():
        token, place = np.argwhere(wrong)[0]
        raise TraceError(
            f"{path}: w: token {token}, layer {layers[place]}: the weights "
            f"{array[token, place].tolist()} are not all finite and 0 or more"
        )
    return weights


def _meta(path: Path, array: Array | None) -> dict[str, Any]:
    """Return what `meta` says, nothing where it is missing."""
    if array is None:
        return {}
    meta = parse_json(str(array), f"{path}: meta") if array.dtype.kind == "U" else None
    if not isinstance(meta, dict) or not isinstance(meta.get("model", ""), str):
        raise TraceError(f"{path}: meta must be the text of a JSON object whose model is a name")
    return meta


def _first_positions(path: Path, meta: dict[str, Any], requests: int) -> list[int]:
    """Return the position of each request's first row, nothing where `meta` does not say it."""
    prompts = meta.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(one, dict) for one in prompts):
        return []
    found = [one["first_pos"] for one in prompts if "first_pos" in one]
    if not found:
        return []
    if len(found) != requests or not all(type(one) is int and 0 <= one < 2**31 for one in found):
        raise TraceError(
            f"{path}: meta: prompts must have a first_pos, a whole number, for each of the "
            f"{requests} requests"
        )
    return found
