"""A trace read piece by piece: forwards and tokens in memory, all other rows as they come by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from oled.trace.errors import TraceError
from oled.trace.files import Columns, batches
from oled.trace.manifest import Manifest
from oled.trace.reader import offsets_of, open_manifest, read_columns, trace_hash, validate
from oled.trace.tables import FORWARDS, TOKENS
from oled.types import Ints

WINDOW_ROWS = 1 << 16
"""Routing rows of a window, about."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceStream:
    """An open trace folder."""

    folder: Path
    manifest: Manifest
    hash: str
    forwards: Columns  # [F] as in the table
    tokens: Columns  # [tokens] as in the table
    token_offsets: Ints  # [F+1]

    @classmethod
    def open(cls, path: str | Path, *, allow_partial: bool = False) -> Self:
        """Read the manifest, the forwards and the tokens."""
        folder = Path(path)
        manifest = open_manifest(folder, allow_partial=allow_partial)
        columns = {table: read_columns(folder, manifest, table) for table in (FORWARDS, TOKENS)}
        validate(folder, columns)
        forwards, tokens = columns[FORWARDS], columns[TOKENS]
        offsets = offsets_of(forwards["tokens"])
        return cls(folder, manifest, trace_hash(manifest), forwards, tokens, offsets)

    @property
    def num_forwards(self) -> int:
        """F."""
        return len(self.forwards["forward"])

    def has(self, table: str) -> bool:
        """Return whether there are rows of this table."""
        return any(part.table == table and part.rows for part in self.manifest.parts)

    def windows(self, rows: int = WINDOW_ROWS) -> Iterator[tuple[int, int]]:
        """Yield ranges of forwards with about so many routing rows (one forward at least)."""
        layers = len(self.manifest.geometry.moe_layers)
        begin = 0
        while begin < self.num_forwards:
            limit = self.token_offsets[begin] + max(rows // layers, 1)
            end = int(np.searchsorted(self.token_offsets, limit, side="right")) - 1
            end = min(max(end, begin + 1), self.num_forwards)
            yield begin, end
            begin = end

    def cursor(self, table: str) -> Cursor:
        """Return a reader of a table's rows, forward after forward."""
        return Cursor(self, table)


class Cursor:
    """Hands out a table's rows by ranges of forwards, each asked for once and in order."""

    def __init__(self, stream: TraceStream, table: str) -> None:
        self._stream = stream
        self._table = table
        self._batches = self._read()
        self._left: list[pa.RecordBatch] = []  # read, but of later forwards
        self._ended = False

    def take(self, end: int) -> pa.Table | None:
        """Return the rows of forwards below `end` that were not taken yet; None for no rows.

        Reads on until a row of a later forward turns up.
        """
        while not self._ended and (not self._left or _last(self._left[-1]) < end):
            batch = next(self._batches, None)
            if batch is None:
                self._ended = True
            elif batch.num_rows:
                self._left.append(batch)
        taken, left = [], []
        for batch in self._left:
            cut = int(np.searchsorted(batch["forward"].to_numpy(), end))
            if cut:
                taken.append(batch.slice(0, cut))
            if cut < batch.num_rows:
                left.append(batch.slice(cut))
        self._left = left
        return pa.Table.from_batches(taken) if taken else None

    def _read(self) -> Iterator[pa.RecordBatch]:
        """Yield the table's batches; refuse rows that do not ascend by known forwards."""
        stream, previous = self._stream, 0
        for part in stream.manifest.parts:
            if part.table != self._table:
                continue
            for batch, start in batches(stream.folder, part, stream.manifest.geometry.top_k):
                forward = batch["forward"].to_numpy()
                steps = np.diff(forward.astype(np.int64), prepend=previous)
                wrong = (steps < 0) | (forward >= stream.num_forwards)
                if wrong.any():
                    row = int(np.argmax(wrong))
                    raise TraceError(
                        f"{stream.folder / part.file}, row {start + row}: forward {forward[row]} "
                        f"is unknown or out of order; run `oled check` on it"
                    )
                previous = int(forward[-1]) if len(forward) else previous
                yield batch


def _last(batch: pa.RecordBatch) -> int:
    return int(batch["forward"][-1].as_py())
