"""Files of a trace folder, read with distrust: names, types, columns and sizes come first."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oled.atomic import UNCLOSED
from oled.trace.errors import TraceError
from oled.trace.manifest import Part
from oled.trace.migrate import added_columns
from oled.trace.tables import SCORES, arrow_schema
from oled.types import Array

Columns = dict[str, Array]
BATCH_ROWS = 1 << 17
"""Rows read at once, however large a file's row groups are."""


def inside(folder: Path, name: str) -> Path:
    """Return a regular file that lies in the folder itself; refuse links that lead out."""
    path = folder / name
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise TraceError(f"{path}: listed in the manifest but missing; restore it") from None
    except OSError as error:
        raise TraceError(f"{path}: can not be read ({error.strerror})") from None
    if not stat.S_ISREG(kind):
        raise TraceError(f"{path}: not a regular file; restore it")
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise TraceError(f"{path}: a link that leads out of the trace; put the file itself there")
    return path


def file_sha256(path: Path) -> str:
    """Return the checksum of a file."""
    try:
        with path.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{path}: can not be read ({error.strerror})") from None


def verify_part(folder: Path, part: Part) -> None:
    """Refuse a part whose bytes are not those that were recorded."""
    if file_sha256(inside(folder, part.file)) != part.sha256:
        raise TraceError(
            f"{folder / part.file}: its checksum is not the manifest's; the file was changed or "
            f"damaged: restore it or record again"
        )


def open_part(folder: Path, part: Part, top_k: int) -> pq.ParquetFile:
    """Open a listed part whose columns and number of rows are those of its table and manifest."""
    path = inside(folder, part.file)
    with _damage(path, ""):
        file = pq.ParquetFile(path)
        _check_schema(path, part, file.schema_arrow, top_k)
    if file.metadata.num_rows != part.rows:
        raise TraceError(
            f"{path}: {file.metadata.num_rows} rows, the manifest says {part.rows}; restore it"
        )
    return file


def batches(
    folder: Path, part: Part, top_k: int, names: Sequence[str] | None = None
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield a part in pieces of at most `BATCH_ROWS` rows, each with the row at which it starts.

    Columns are those of the present schema, in its order; what an older part lacks is added.
    """
    file = open_part(folder, part, top_k)
    stored = stored_columns(part, file.schema_arrow, top_k)
    added = added_columns(part.table, part.version)
    names = expected_schema(part, file.schema_arrow, top_k).names if names is None else list(names)
    wanted = stored if added else names
    start = 0
    for group in range(file.num_row_groups):
        pieces = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=wanted)
        while True:
            with _damage(folder / part.file, f"row group {group} "):
                batch = next(pieces, None)
                if batch is None:
                    break
                batch.validate(full=True)
            for name, fill in added.items():
                batch = batch.append_column(name, fill(batch))
            yield batch.select(names), start
            start += batch.num_rows
    if start != part.rows:
        raise TraceError(
            f"{folder / part.file}: holds {start} rows, its footer says {part.rows}; restore it"
        )


def row_groups(
    folder: Path, part: Part, top_k: int, names: Sequence[str] | None = None
) -> Iterator[tuple[Columns, int]]:
    """Yield `batches` as arrays."""
    for batch, start in batches(folder, part, top_k, names):
        with _damage(folder / part.file, f"near row {start} "):
            columns = {
                name: to_numpy(column)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
        yield columns, start


def to_numpy(column: pa.Array) -> Array:
    """Return a column as [n] or, of fixed-size lists, [n, k]; maybe read-only. Refuse nulls."""
    if column.null_count:
        raise pa.ArrowInvalid(f"{column.null_count} values are missing")
    if pa.types.is_fixed_size_list(column.type):
        flat = column.flatten()
        if flat.null_count:
            raise pa.ArrowInvalid(f"{flat.null_count} values are missing")
        values = flat.to_numpy(zero_copy_only=True)
        return np.asarray(values.reshape(-1, column.type.list_size))
    return np.asarray(column.to_numpy(zero_copy_only=False))


def expected_schema(part: Part, found: pa.Schema, top_k: int) -> pa.Schema:
    """Return the columns that a part of this table must have; scores are as wide as they say."""
    width, biased = 0, False
    if part.table == SCORES and "values" in found.names:
        kind = found.field("values").type
        width = kind.list_size if pa.types.is_fixed_size_list(kind) else 0
        biased = "biased" in found.names
    return arrow_schema(part.table, top_k, width=width, biased=biased)


def stored_columns(part: Part, found: pa.Schema, top_k: int) -> list[str]:
    """Return the names of the columns that a part of this version holds; others are not read."""
    added = added_columns(part.table, part.version)
    return [name for name in expected_schema(part, found, top_k).names if name not in added]


@contextmanager
def _damage(path: Path, where: str) -> Iterator[None]:
    """Turn what Arrow says of a damaged file into one line with its name."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise TraceError(f"{path}: {where}not readable as Parquet ({reason}); restore it") from None


def _check_schema(path: Path, part: Part, found: pa.Schema, top_k: int) -> None:
    expected = expected_schema(part, found, top_k)
    for name in stored_columns(part, found, top_k):
        if found.names.count(name) != 1:
            raise TraceError(f"{path}: column '{name}' is missing or there twice")
        kind, right = found.field(name).type, expected.field(name).type
        if kind != right:
            raise TraceError(f"{path}: column '{name}' is {kind}, not {right}")


def unlisted_files(folder: Path, listed: set[str]) -> list[str]:
    """Return files of parts that were never closed, or never listed."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    return sorted(
        name
        for name in names
        if name.endswith(UNCLOSED) or (name.endswith(".parquet") and name not in listed)
    )
