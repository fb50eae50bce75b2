"""Arrays from files of other tools: npy, npz, safetensors. Nothing in them is executed."""

from __future__ import annotations

import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields, parse_json
from oled.trace.limits import require_memory
from oled.types import Array

MAX_HEADER_BYTES = 16 << 20
DAMAGE = (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    SyntaxError,
    MemoryError,
    OverflowError,
    RuntimeError,  # unsupported compression, encryption, too deep a nesting
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
)
"""What readers raise where a file is not what it should be."""

_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",  # widened below
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "?",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings about what a file holds: it is refused, or it is harmless."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def damage(path: Path, kind: str) -> Iterator[None]:
    """Turn what a reader says of a damaged file into one line with its name."""
    try:
        with quiet():
            yield
    except TraceError:
        raise
    except DAMAGE as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise TraceError(f"{path}: not readable as {kind} ({reason})") from None


def read_npy(path: Path) -> Array:
    """Read one array, mapped rather than copied; pickled objects are refused."""
    with damage(path, "NPY"):
        return np.asarray(np.load(path, allow_pickle=False, mmap_mode="r"))


def read_npz(path: Path) -> dict[str, Array]:
    """Read arrays by name, in the order of the file; pickled objects are refused."""
    with damage(path, "NPZ"):
        with zipfile.ZipFile(path) as archive:
            require_memory(sum(info.file_size for info in archive.infolist()), str(path))
        data = np.load(path, allow_pickle=False)
        if not isinstance(data, np.lib.npyio.NpzFile):
            raise ValueError("it begins as another kind of file")
        with data:
            return {name: _array(data[name]) for name in data.files}


def _array(value: Any) -> Array:
    if not isinstance(value, np.ndarray):
        raise ValueError("a member is no array")
    return value


def read_safetensors(path: Path) -> dict[str, Array]:
    """Read tensors by name, mapped rather than copied; bfloat16 becomes float32."""
    with damage(path, "safetensors"):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes")
            header = parse_json(file.read(length).decode("utf-8"), str(path))
        names = [name for name in JsonFields(header, str(path)).data if name != "__metadata__"]
        return {name: _tensor(path, name, header[name], 8 + length, size) for name in names}


def _tensor(path: Path, name: str, about: Any, start: int, size: int) -> Array:
    fields = JsonFields(about, f"{path}: {name}")
    kind = fields.get("dtype", str)
    if kind not in _DTYPES:
        raise TraceError(f"{path}: {name} is {kind}, which has no use here")
    dtype = np.dtype(_DTYPES[kind])
    shape, offsets = fields.items("shape", int), fields.items("data_offsets", int)
    begin, end = offsets if len(offsets) == 2 else (0, -1)
    fits = 0 <= begin <= end <= size - start and min(shape, default=0) >= 0
    if not fits or prod(shape) * dtype.itemsize != end - begin:
        raise TraceError(f"{path}: {name}: shape {shape} does not fit its bytes {offsets}")
    if begin == end:
        return np.empty(shape, dtype=dtype)
    data = np.memmap(path, dtype, "r", offset=start + begin, shape=shape)
    if kind == "BF16":
        return (np.asarray(data).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(data)
