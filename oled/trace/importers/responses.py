"""JSON responses of serving engines: one, a list, or one a line; and the arrays in them."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields, brief, parse_json
from oled.trace.importers.arrays import damage, read_npy, read_npz
from oled.trace.importers.routed import Routes
from oled.types import Array


def arrays_of(path: Path) -> dict[str, Array] | None:
    """Read arrays of an NPY (named by its stem) or NPZ file; None where it is neither."""
    if path.suffix == ".npy":
        return {path.stem: read_npy(path)}
    return read_npz(path) if path.suffix == ".npz" else None


def objects_of(path: Path) -> Iterator[JsonFields]:
    """Yield the JSON objects of a file, each with its place for messages."""
    with damage(path, "text"):
        text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield JsonFields(parse_json(line, where), where)
        return
    value = parse_json(text, str(path))
    items = value if isinstance(value, list) else [value]
    for number, item in enumerate(items):
        where = f"{path}: response {number}" if isinstance(value, list) else str(path)
        yield JsonFields(item, where)


def plain_routes(arrays: dict[str, Array]) -> list[Routes]:
    """Make each array a request of its own."""
    return [Routes(name, ids) for name, ids in arrays.items()]


def from_base64(text: str, where: str) -> bytes:
    """Return the bytes that such a text stands for."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"{where}: not base64 ({error})") from None


def decoded_array(value: Any, where: str) -> Array:
    """Read ids as nested lists, a base64 NPY file, or {data, dtype, shape} with base64 data."""
    with damage(Path(where), "an array of ids"):
        ids = _decoded(value, where)
        if ids.dtype.kind not in "iu" and ids.size:
            raise ValueError(f"ids of type {ids.dtype}")
        return ids


def _decoded(value: Any, where: str) -> Array:
    match value:
        case list():
            return np.array(value)
        case str():
            file = io.BytesIO(from_base64(value, where))
            return np.asarray(np.load(file, allow_pickle=False))
        case dict():
            fields = JsonFields(value, where)
            data = from_base64(fields.get("data", str), where)
            dtype = np.dtype(fields.get("dtype", str))
            return np.frombuffer(data, dtype).reshape(fields.items("shape", int))
    raise TraceError(f"{where}: {brief(value)} is no array of ids")


def integers(fields: JsonFields, key: str) -> tuple[int, ...] | None:
    """Return a list of whole numbers, None where it is null or missing."""
    return None if fields.data.get(key) is None else fields.items(key, int)
