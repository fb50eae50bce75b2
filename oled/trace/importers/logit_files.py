"""Files of router logits: one forward each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import brief
from oled.trace.importers.arrays import read_npz, read_safetensors
from oled.trace.importers.tensors import read_tensors
from oled.types import Array, Bools

MASK, TOKENS, LOGITS = "attention_mask", "input_ids", "router_logits"


@dataclass(frozen=True, slots=True, eq=False)
class LogitFile:
    """The logits of one forward."""

    path: Path
    count: int  # layers of the axis, dense ones included
    layers: dict[int, Array]  # place on that axis: [batch * seq, E]
    batch: int | None
    mask: Bools | None  # [batch, seq] true where there is a token
    token_ids: Array | None  # [batch, seq]


def read_logits(path: Path) -> LogitFile:
    """Read a list of layers, or arrays by name."""
    match path.suffix:
        case ".npz":
            data: Any = read_npz(path)
        case ".safetensors":
            data = read_safetensors(path)
        case _:
            data = read_tensors(path)
    named = dict(data) if isinstance(data, dict) else {LOGITS: data}
    mask, tokens = named.pop(MASK, None), named.pop(TOKENS, None)
    layers = named.pop(LOGITS) if named.keys() == {LOGITS} else named
    places = _by_name(path, layers) if isinstance(layers, dict) else _by_place(path, layers)
    arrays = {place: value for place, value in places.items() if value is not None}
    if not arrays:
        raise TraceError(f"{path}: holds no logits")
    shapes = {array.shape for array in arrays.values()}
    if len({shape[:-1] for shape in shapes}) > 1:
        raise TraceError(f"{path}: layers differ in their number of tokens")
    (lead, *_), batch = (shape[:-1] for shape in shapes), None
    if len(lead) == 2:
        batch = lead[0]
    return LogitFile(
        path=path,
        count=max(places) + 1,
        layers={place: array.reshape(-1, array.shape[-1]) for place, array in arrays.items()},
        batch=batch,
        mask=None if mask is None else _matrix(path, MASK, mask) != 0,
        token_ids=None if tokens is None else _matrix(path, TOKENS, tokens),
    )


def _by_place(path: Path, layers: Any) -> dict[int, Array | None]:
    if not isinstance(layers, list):
        raise TraceError(f"{path}: {brief(layers)} is no list of layers")
    return {
        place: None if layer is None else _logits(path, f"layer {place}", layer)
        for place, layer in enumerate(layers)
    }


def _by_name(path: Path, layers: dict[Any, Any]) -> dict[int, Array | None]:
    found: dict[int, Array | None] = {}
    for name, layer in layers.items():
        numbers = re.findall(r"[0-9]{1,5}", str(name))
        if not numbers or int(numbers[-1]) in found:
            raise TraceError(f"{path}: {brief(name)} names no layer, or one that was there already")
        found[int(numbers[-1])] = _logits(path, str(name), layer)
    return found


def _logits(path: Path, name: str, value: Any) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        raise TraceError(f"{path}: {name} is no tensor of floating-point numbers: {brief(value)}")
    if value.ndim not in (2, 3) or 0 in value.shape:
        raise TraceError(
            f"{path}: {name} has shape {list(value.shape)}, not [batch * seq, experts]"
        )
    return value


def _matrix(path: Path, name: str, value: Any) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iub" or value.ndim != 2:
        raise TraceError(f"{path}: {name} must be [batch, seq] of whole numbers")
    return value
