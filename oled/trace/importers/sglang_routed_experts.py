"""`return_routed_experts` of SGLang: int32 [tokens, layers, k], all layers, zeros in dense ones.

As NPY (one request), NPZ (one request an array), or JSON: responses of /generate (one, a list, one
a line) whose `meta_info.routed_experts` is the array's bytes in base64. The bytes hold no shape, so
that `layers` and `top_k` (or `model`) must then be given; `prompt_tokens` and `completion_tokens`
tell prompt and length. The last token of a sequence is never forwarded, so there are len - 1 rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields
from oled.trace.importers.facts import Facts
from oled.trace.importers.responses import arrays_of, from_base64, objects_of, plain_routes
from oled.trace.importers.routed import LACKS, OPTIONS, Routes, source_of
from oled.trace.importers.source import Format, Source
from oled.trace.options import Options
from oled.types import Array

NAME = "sglang_routed_experts"


def read(path: Path, options: Options) -> Source:
    """Read one request an array or response."""
    arrays = arrays_of(path)
    if arrays is not None:
        return source_of(NAME, path, plain_routes(arrays), options)
    facts = Facts.of(options)
    return source_of(NAME, path, [_routes(fields, facts) for fields in objects_of(path)], options)


FORMAT = Format(
    NAME,
    "SGLang's return_routed_experts: ids [tokens, layers, k] (.npy, .npz, .json, .jsonl)",
    read,
    LACKS,
    OPTIONS,
)


def _routes(fields: JsonFields, facts: Facts) -> Routes:
    where = fields.where
    meta = JsonFields(fields.get("meta_info", dict), f"{where}: meta_info")
    data = from_base64(meta.get("routed_experts", str), where)
    prompt = meta.optional("prompt_tokens", int)
    completion = meta.optional("completion_tokens", int)
    ids = _shaped(data, facts, where)
    if prompt is not None and completion is not None:
        _check_length(len(ids), prompt, completion, where)
    return Routes(where, ids, prompt)


def _shaped(data: bytes, facts: Facts, where: str) -> Array:
    if facts.num_layers is None or facts.top_k is None:
        raise TraceError(
            f"{where}: the bytes hold no shape: give layers=… and top_k=…, or model=NAME"
        )
    row = facts.num_layers * facts.top_k
    if row == 0 or not data or len(data) % (4 * row):
        raise TraceError(
            f"{where}: {len(data)} bytes are no whole number of int32 rows of "
            f"{facts.num_layers} layers of {facts.top_k}"
        )
    return np.frombuffer(data, "<i4").reshape(-1, facts.num_layers, facts.top_k)


def _check_length(rows: int, prompt: int, completion: int, where: str) -> None:
    """Refuse lost rows; only the token that ended the sequence has none."""
    if rows != prompt + completion - 1:
        raise TraceError(
            f"{where}: {rows} rows for {prompt} prompt and {completion} new tokens; expected "
            f"{prompt + completion - 1}: rows were lost, or layers and top_k are wrong"
        )
