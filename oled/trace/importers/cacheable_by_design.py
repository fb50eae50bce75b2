"""NPZ of cacheable-by-design (Shriniwas410/cacheable-by-design): expert ids of a text.

`experts` int16 [L, N, k] and `meta`, a JSON string. The text was run through the model in windows
of 512 tokens, each with a fresh context. Here every token is a forward of its own (phase decode),
so that a replay goes token by token as the authors' does; positions and context lengths start
again at each window. There are no weights, confidences or token ids, and the bytes of an expert are
the 6 MB that the authors assume.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields, parse_json
from oled.trace.importers.arrays import read_npz
from oled.trace.importers.records import plain_record
from oled.trace.importers.source import Format, Source, provenance
from oled.trace.manifest import Manifest
from oled.trace.options import Options
from oled.trace.schema import (
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Phase,
    TokenState,
    WeightKind,
)
from oled.types import Array

NAME = "cacheable_by_design"
LACKS = ("weights", "confidence", "token_ids", "decoding", "layers", "expert_bytes")
WINDOW = 512
EXPERT_BYTES = 6_000_000


def read(path: Path, options: Options) -> Source:
    """Read the whole text as request 0."""
    experts, meta = _arrays(path)
    fields = JsonFields(meta, f"{path}: meta")
    layers = fields.get("n_moe_layers", int)
    count = fields.get("num_experts", int)
    top_k = fields.get("k", int)
    if experts.ndim != 3 or (experts.shape[0], experts.shape[2]) != (layers, top_k):
        raise TraceError(
            f"{path}: experts {experts.shape} must be (layers {layers}, tokens, k {top_k}), by meta"
        )
    wrong = (experts < 0) | (experts >= count)
    if wrong.any():
        layer, token, slot = (int(axis[0]) for axis in np.nonzero(wrong))
        raise TraceError(
            f"{path}: experts[{layer}, {token}, {slot}] is {experts[layer, token, slot]}; meta "
            f"says {count} experts"
        )
    manifest = Manifest(
        geometry=Geometry(
            moe_layers=tuple(range(layers)),
            experts_per_layer=(count,) * layers,
            top_k=top_k,
            expert_bytes=(EXPERT_BYTES,) * layers,
            num_layers=layers,
        ),
        weight_kind=WeightKind.NONE,
        confidence_kind=ConfidenceKind.NONE,
        model={"id": fields.get("model", str), "revision": None, "dtype": "gguf"},
        decode={"mode": "prefill_windows", "window": WINDOW},
        provenance={**provenance(NAME, path), "meta": meta},
        lacks=LACKS,
    )
    return Source(manifest, _records(experts))


FORMAT = Format(
    NAME,
    "NPZ of cacheable-by-design: ids of every token in windows of a text",
    read,
    LACKS,
)


def _arrays(path: Path) -> tuple[Array, Any]:
    arrays = read_npz(path)
    missing = [name for name in ("experts", "meta") if name not in arrays]
    if missing:
        raise TraceError(f"{path}: {missing[0]} is missing; expected experts and meta")
    experts = arrays["experts"]
    if experts.dtype.kind not in "iu":
        raise TraceError(f"{path}: experts are {experts.dtype}, not integers")
    return experts, parse_json(str(arrays["meta"]), f"{path}: meta")


def _records(experts: Array) -> Iterator[ForwardRecord]:
    layers = np.arange(experts.shape[0])
    by_token = np.ascontiguousarray(experts.swapaxes(0, 1))  # [N, L, k]
    for token, ids in enumerate(by_token):
        yield plain_record(
            token,
            Phase.DECODE,
            layers,
            ids[:, None],
            context=token % WINDOW,
            state=np.array([TokenState.PROMPT]),
            produced=1,
        )
