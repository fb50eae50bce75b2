"""From a trace folder to arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.manifest import Manifest, Part, Status, read_manifest
from oled.trace.tables import (
    FORWARD_COLUMNS,
    FORWARDS,
    PREDICTIONS,
    REQUIRED_TABLES,
    ROUTING,
    SCORES,
    TOKEN_COLUMNS,
    TOKENS,
    ForwardTable,
    PredictionTable,
    RoutingTable,
    ScoreTable,
    TokenTable,
    Trace,
    arrow_schema,
)
from oled.trace.writer import UNCLOSED

Columns = dict[str, NDArray[Any]]


def load(path: str | Path, *, allow_partial: bool = False, verify: bool = False) -> Trace:
    """Read a trace; `verify` compares every part with its checksum first.

    A partial trace (a crash, an exception, a recorder still at work) is refused unless allowed;
    then its closed parts are read.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if manifest.status is Status.PARTIAL and not allow_partial:
        raise TraceError(partial_message(folder, manifest))
    if verify:
        for part in manifest.parts:
            if file_sha256(folder / part.file) != part.sha256:
                raise TraceError(
                    f"{folder / part.file}: its checksum is not the manifest's; the file was "
                    f"changed or damaged: restore it or record again"
                )
    present = {part.table for part in manifest.parts}
    for table in REQUIRED_TABLES:
        if table not in present:
            raise TraceError(f"{folder}: there is no closed part of '{table}'; record again")
    columns = {
        FORWARDS: read_columns(folder, manifest, FORWARDS),
        TOKENS: read_columns(folder, manifest, TOKENS),
        ROUTING: read_columns(folder, manifest, ROUTING),
    }
    if SCORES in present:
        columns[SCORES] = read_columns(folder, manifest, SCORES)
    said = _read_predictions(folder, manifest) if PREDICTIONS in present else None
    return assemble(folder, manifest, trace_hash(manifest), columns, said)


def assemble(
    path: Path,
    manifest: Manifest,
    digest: str,
    columns: Mapping[str, Columns],
    predictions: pa.Table | None,
) -> Trace:
    """A trace from the columns of its tables."""
    forwards, tokens = columns[FORWARDS], columns[TOKENS]
    offsets = np.zeros(len(forwards["tokens"]) + 1, dtype=np.int64)
    np.cumsum(forwards["tokens"], out=offsets[1:])
    if len(tokens["position"]) != offsets[-1]:
        raise TraceError(
            f"{path}: {len(tokens['position'])} token rows, but the forwards add up to "
            f"{offsets[-1]}; run `oled check` on it"
        )
    scores: dict[str, Any] | None = dict(columns[SCORES]) if SCORES in columns else None
    return Trace(
        path=path,
        manifest=manifest,
        hash=digest,
        forwards=ForwardTable(
            **{name: forwards[name] for name, _ in FORWARD_COLUMNS}, token_offsets=offsets
        ),
        tokens=TokenTable(**{name: tokens[name] for name, _ in TOKEN_COLUMNS}),
        routing=RoutingTable(**columns[ROUTING]),
        predictions=None if predictions is None else _predictions(predictions),
        scores=None if scores is None else ScoreTable(**{"biased": None} | scores),
    )


def trace_hash(manifest: Manifest) -> str:
    """What results name a trace by: sha256 of the geometry and the parts' checksums."""
    digest = hashlib.sha256(json.dumps(manifest.geometry.to_json(), sort_keys=True).encode())
    for part in manifest.parts:
        digest.update(f"{part.table} {part.sha256}\n".encode())
    return digest.hexdigest()


def partial_message(folder: Path, manifest: Manifest) -> str:
    """What a partial trace still holds, what is lost, and what to do."""
    kept = [part for part in manifest.parts if part.table == FORWARDS]
    forwards = sum(part.rows for part in kept)
    lost = unlisted_files(folder, manifest)
    broken = f"; {', '.join(lost)} never closed" if lost else ""
    if not forwards:
        return f"{folder}: the trace is partial and holds no closed part{broken}. Record again"
    return (
        f"{folder}: the trace is partial: {len(kept)} closed parts hold forwards 0 to "
        f"{forwards - 1}{broken}; everything from forward {forwards} on is lost. Record again, or "
        f"use what is left with allow_partial=true"
    )


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files of parts that were never closed, or never listed."""
    listed = {part.file for part in manifest.parts}
    return sorted(
        file.name
        for file in folder.iterdir()
        if file.suffix == UNCLOSED or (file.suffix == ".parquet" and file.name not in listed)
    )


def file_sha256(file: Path) -> str:
    """The checksum of a part file."""
    try:
        with file.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except FileNotFoundError:
        raise TraceError(f"{file}: listed in the manifest but missing; restore it") from None


def open_part(folder: Path, part: Part) -> pq.ParquetFile:
    """Open a listed part and compare its row count with the manifest's."""
    path = folder / part.file
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise TraceError(f"{path}: listed in the manifest but missing; restore it") from None
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}: not readable as Parquet ({error}); restore it") from None
    if file.metadata.num_rows != part.rows:
        raise TraceError(
            f"{path}: {file.metadata.num_rows} rows, the manifest says {part.rows}; restore it"
        )
    return file


def row_groups(
    folder: Path, part: Part, names: Sequence[str] | None = None
) -> Iterator[tuple[Columns, int]]:
    """A part's columns by row group, with the row at which the group starts in its file."""
    file = open_part(folder, part)
    start = 0
    for group in range(file.num_row_groups):
        try:
            data = file.read_row_group(group, columns=names)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(
                f"{folder / part.file}: row group {group} is not readable ({error}); restore it"
            ) from None
        yield {name: to_numpy(data.column(name)) for name in data.column_names}, start
        start += data.num_rows


def read_columns(
    folder: Path, manifest: Manifest, table: str, names: Sequence[str] | None = None
) -> Columns:
    """Columns of all parts of a table without lists of varying length, each filled in place."""
    parts = [part for part in manifest.parts if part.table == table]
    check_schema(folder, parts, table, manifest.geometry.top_k)
    total = sum(part.rows for part in parts)
    columns: Columns = {}
    at = 0
    for part in parts:
        for group, _ in row_groups(folder, part, names):
            rows = 0
            for name, values in group.items():
                if name not in columns:
                    columns[name] = np.empty((total, *values.shape[1:]), dtype=values.dtype)
                rows = len(values)
                columns[name][at : at + rows] = values
            at += rows
    return columns


def check_schema(folder: Path, parts: Sequence[Part], table: str, top_k: int) -> None:
    """Refuse parts whose columns are missing or of another type."""
    for part in parts:
        found = open_part(folder, part).schema_arrow
        width, biased = 0, False
        if table == SCORES and "values" in found.names:
            width = found.field("values").type.list_size
            biased = "biased" in found.names
        for field in arrow_schema(table, top_k, width=width, biased=biased):
            if field.name not in found.names:
                raise TraceError(f"{folder / part.file}: column '{field.name}' is missing")
            kind = found.field(field.name).type
            if kind != field.type:
                raise TraceError(
                    f"{folder / part.file}: column '{field.name}' is {kind}, not {field.type}"
                )


def to_numpy(column: pa.ChunkedArray) -> NDArray[Any]:
    """A column as [n] or, of fixed-size lists, [n, k]; maybe read-only."""
    data = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if pa.types.is_fixed_size_list(data.type):
        flat = data.flatten().to_numpy(zero_copy_only=True)
        return np.asarray(flat.reshape(-1, data.type.list_size))
    return np.asarray(data.to_numpy(zero_copy_only=False))


def _read_predictions(folder: Path, manifest: Manifest) -> pa.Table:
    parts = [part for part in manifest.parts if part.table == PREDICTIONS]
    check_schema(folder, parts, PREDICTIONS, manifest.geometry.top_k)
    return pa.concat_tables(open_part(folder, part).read() for part in parts)


def _predictions(data: pa.Table) -> PredictionTable:
    data = data.combine_chunks()
    experts = data.column("expert_ids").chunk(0)
    names = data.column("predictor").unique().to_pylist()
    code = {name: index for index, name in enumerate(names)}
    predictor = [code[name] for name in data.column("predictor").to_pylist()]
    return PredictionTable(
        forward=data.column("forward").to_numpy().copy(),
        layer=data.column("layer").to_numpy().copy(),
        target=data.column("target").to_numpy().copy(),
        predictor=np.array(predictor, dtype=np.uint8),
        offsets=experts.offsets.to_numpy().astype(np.int64),
        expert=experts.flatten().to_numpy().copy(),
        score=data.column("scores").chunk(0).flatten().to_numpy().copy(),
        names=tuple(names),
    )
