"""Records in, a trace folder out: what is appended is checked, gathered, and written by parts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.manifest import Manifest
from oled.trace.parts import PartFolder
from oled.trace.rows import record_tables
from oled.trace.schema import NO_EXPERT, ForwardRecord

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
        self.num_forwards = 0
        geometry = manifest.geometry
        self._rows_per_part = rows_per_part
        self._rows_per_group = min(rows_per_group, rows_per_part)
        self._pending: list[ForwardRecord] = []
        self._pending_rows = 0
        self._part_rows = 0
        self._layers = geometry.dense_index()
        self._num_ids = np.array(geometry.experts_per_layer) + geometry.zero_experts  # [L]
        self._captured = False
        self._folder = PartFolder(path, manifest)

    @property
    def manifest(self) -> Manifest:
        """With the parts closed so far."""
        return self._folder.manifest

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
            with contextlib.suppress(TraceError):  # the first error is the one to tell
                self.close_part()

    def append(self, record: ForwardRecord) -> None:
        """Add one forward; forwards are numbered in the order of these calls."""
        self._validate(record)
        self._pending.append(record)
        self._pending_rows += record.num_rows
        self._part_rows += record.num_rows
        self.num_forwards += 1
        if self._part_rows >= self._rows_per_part:
            self.close_part()
        elif self._pending_rows >= self._rows_per_group:
            self._write_group()

    def close_part(self) -> None:
        """Make everything appended so far safe; call it after a request, if you like."""
        self._write_group()
        self._folder.close_part()
        self._part_rows = 0

    def close(self) -> None:
        """Close the last part and declare the trace complete; refuses an empty capture."""
        self.close_part()
        if not self._captured:
            what = "every expert id and weight is zero" if self.num_forwards else "it is empty"
            raise TraceError(
                f"{self.path}: {what}: the router was not captured; the trace stays partial"
            )
        self._folder.complete()

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
        ids = record.expert_ids
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
        self._folder.write(tables)
