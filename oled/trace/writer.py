"""The crash-safe writer: closed part files, and a manifest that never promises too much.

All tables of a part hold the same forwards. A part is written under a temporary name, synced,
renamed, and only then listed in `trace.json` (itself replaced in one step), so that whatever is
listed is whole. Creating `trace.json` is also the lock: a second writer finds it and refuses.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oled.trace.errors import TraceError
from oled.trace.manifest import MANIFEST, Manifest, Part, Status, manifest_text
from oled.trace.rows import record_tables, row_mask
from oled.trace.schema import NO_EXPERT, ForwardRecord, as_expert_ids

UNCLOSED = ".unclosed"
"""Suffix of a file in the making; what a crash leaves behind."""
ROWS_PER_PART = 1 << 18
ROWS_PER_GROUP = 1 << 16


class TraceWriter:
    """Writes a trace folder record by record.

    `rows_per_part` counts routing rows: about what a crash can lose at most. Leaving the `with`
    block cleanly makes the trace complete; leaving it by an exception keeps what was appended, as
    a partial trace. The arrays of a record belong to the writer once appended.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: Manifest,
        *,
        rows_per_part: int = ROWS_PER_PART,
        rows_per_group: int = ROWS_PER_GROUP,
    ) -> None:
        self.path = Path(path)
        self.manifest = replace(manifest, status=Status.PARTIAL, parts=())
        self.num_forwards = 0
        geometry = manifest.geometry
        self._rows_per_part = rows_per_part
        self._rows_per_group = min(rows_per_group, rows_per_part)
        self._pending: list[ForwardRecord] = []
        self._pending_rows = 0
        self._part = 0
        self._part_rows = 0
        self._files: dict[str, pq.ParquetWriter] = {}
        self._layers = geometry.dense_index()
        self._num_ids = np.array(geometry.experts_per_layer) + geometry.zero_experts  # [L]
        self._captured = False
        self._claim()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close_part()

    def append(self, record: ForwardRecord) -> None:
        """Add one forward; forwards are numbered in the order of these calls."""
        self._validate(record)
        self._pending.append(record)
        rows = int(row_mask(record).sum())
        self._pending_rows += rows
        self._part_rows += rows
        self.num_forwards += 1
        if self._part_rows >= self._rows_per_part:
            self.close_part()
        elif self._pending_rows >= self._rows_per_group:
            self._write_group()

    def close_part(self) -> None:
        """Make everything appended so far safe; call it after a request, if you like."""
        self._write_group()
        if not self._files:
            return
        parts = [self._close_file(table, file) for table, file in self._files.items()]
        self._files = {}
        self._part += 1
        self._part_rows = 0
        self.manifest = replace(self.manifest, parts=(*self.manifest.parts, *parts))
        self._write_manifest()

    def close(self) -> None:
        """Close the last part and declare the trace complete; refuses an empty capture."""
        self.close_part()
        if not self._captured:
            what = "every expert id and weight is zero" if self.num_forwards else "it is empty"
            raise TraceError(
                f"{self.path}: {what}: the router was not captured; the trace stays partial"
            )
        self.manifest = replace(self.manifest, status=Status.COMPLETE)
        self._write_manifest()

    def _claim(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            if any(file.suffix in (".parquet", UNCLOSED) for file in self.path.iterdir()):
                raise FileExistsError
            with (self.path / MANIFEST).open("x", encoding="utf-8") as file:
                file.write(manifest_text(self.manifest))
        except FileExistsError:
            raise TraceError(
                f"{self.path}: already holds a trace (or another writer is at work there); "
                f"choose another folder or delete it"
            ) from None

    def _validate(self, record: ForwardRecord) -> None:
        name = f"forward {self.num_forwards} (request {record.request}, pass {record.pass_id})"
        top_k = self.manifest.geometry.top_k
        if record.expert_ids.shape[2] != top_k:
            raise TraceError(
                f"{name}: {record.expert_ids.shape[2]} experts per token, but the manifest's "
                f"top_k is {top_k}"
            )
        for layer in record.layers:
            if int(layer) not in self._layers:
                raise TraceError(f"{name}: layer {layer} is no MoE layer of the manifest")
        if record.layers.size == 0:
            return
        ids = as_expert_ids(record.expert_ids)
        index = np.array([self._layers[int(layer)] for layer in record.layers])
        limit = self._num_ids[index][:, None, None]
        wrong = (ids >= limit) & (ids != NO_EXPERT)
        if wrong.any():
            layer, token, slot = (int(axis[0]) for axis in np.nonzero(wrong))
            raise TraceError(
                f"{name}, layer {record.layers[layer]}, token {token}: expert id "
                f"{ids[layer, token, slot]} where the layer has {int(limit[layer, 0, 0])}"
            )
        # a buffer that was never written is all zeros: expert 0 with weight 0
        self._captured = self._captured or bool(ids.any() or record.weights.any())

    def _write_group(self) -> None:
        if not self._pending:
            return
        first = self.num_forwards - len(self._pending)
        tables = record_tables(first, self._pending, self.manifest.geometry.top_k)
        self._pending = []
        self._pending_rows = 0
        for table, data in tables.items():
            if table not in self._files:
                self._files[table] = _open_file(self._name(table, UNCLOSED), data.schema)
            self._files[table].write_table(data, row_group_size=data.num_rows)

    def _close_file(self, table: str, file: pq.ParquetWriter) -> Part:
        file.close()
        temporary, final = self._name(table, UNCLOSED), self._name(table)
        with temporary.open("rb+") as data:
            checksum = hashlib.file_digest(data, "sha256").hexdigest()
            os.fsync(data.fileno())
        rows = pq.read_metadata(temporary).num_rows
        temporary.rename(final)
        return Part(table, final.name, rows, checksum)

    def _name(self, table: str, suffix: str = "") -> Path:
        return self.path / f"{table}-{self._part:05d}.parquet{suffix}"

    def _write_manifest(self) -> None:
        temporary = self.path / f"{MANIFEST}{UNCLOSED}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(manifest_text(self.manifest))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / MANIFEST)
        folder = os.open(self.path, os.O_RDONLY)  # the renames themselves must reach the disk
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _open_file(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    split: list[str] = []  # floats by byte planes
    plain: list[str] = []  # everything else by dictionary
    for field in schema:
        nested = pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)
        leaf = f"{field.name}.list.element" if nested else field.name
        value = field.type.value_type if nested else field.type
        (split if pa.types.is_floating(value) else plain).append(leaf)
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=plain,
        column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
    )
