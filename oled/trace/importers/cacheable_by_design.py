"""NPZ of cacheable-by-design (Shriniwas410/cacheable-by-design): expert ids of a text.

`experts` int16 [L, N, k] and `meta`, a JSON string. The text was run through the model in windows
of 512 tokens, each with a fresh context. Here every token is a forward of its own (phase decode),
so that a replay goes token by token as the authors' does; positions and context lengths start
again at each window. There are no weights, confidences or token ids, and the bytes of an expert are
the 6 MB that the authors assume.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields
from oled.trace.importers.source import Source, provenance
from oled.trace.manifest import Manifest
from oled.trace.schema import (
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Phase,
    TokenState,
    WeightKind,
)

WINDOW = 512
EXPERT_BYTES = 6_000_000


def read(path: Path) -> Source:
    """The whole text as request 0."""
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
        provenance={**provenance("cacheable_by_design", path), "meta": meta},
        lacks=("weights", "confidence", "token_ids", "decoding", "expert_bytes"),
    )
    return Source(manifest, _records(experts))


def _arrays(path: Path) -> tuple[NDArray[Any], Any]:
    try:
        with np.load(path, allow_pickle=False) as data:
            return data["experts"], json.loads(str(data["meta"]))
    except KeyError as error:
        raise TraceError(
            f"{path}: {str(error).strip(chr(34))}; expected experts and meta"
        ) from None
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path}: not readable as such an NPZ ({error})") from None


def _records(experts: NDArray[Any]) -> Iterator[ForwardRecord]:
    layers = np.arange(experts.shape[0])
    by_token = np.ascontiguousarray(experts.swapaxes(0, 1))  # [N, L, k]
    weights = np.zeros((experts.shape[0], 1, experts.shape[2]), dtype=np.float32)
    for token, ids in enumerate(by_token):
        position = token % WINDOW
        yield ForwardRecord(
            request=0,
            pass_id=token,
            phase=Phase.DECODE,
            layers=layers,
            expert_ids=ids[:, None],
            weights=weights,
            positions=np.array([position]),
            token_ids=np.array([-1]),
            confidence=np.array([np.nan]),
            state=np.array([TokenState.PROMPT]),
            accepted_mask=np.array([1]),
            context_length=position,
            accepted=1,
            produced=1,
        )
