"""Traces without a folder: made from records, or cut from other traces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.files import Columns, to_numpy
from oled.trace.manifest import Manifest, Status
from oled.trace.reader import assemble, offsets_of, prediction_table
from oled.trace.rows import record_tables
from oled.trace.schema import ForwardRecord
from oled.trace.tables import (
    PREDICTIONS,
    ForwardTable,
    PredictionTable,
    RoutingTable,
    ScoreTable,
    TokenTable,
    Trace,
)
from oled.types import Bools

MEMORY = Path("(memory)")
"""The path that messages name for a trace without a folder."""


def trace_of_records(manifest: Manifest, records: Iterable[ForwardRecord]) -> Trace:
    """Make a trace in memory; nothing is written, and nothing is checked but shapes."""
    tables = record_tables(0, list(records), manifest.geometry.top_k)
    said = tables.pop(PREDICTIONS, None)
    digest = hashlib.sha256(json.dumps(manifest.geometry.to_json(), sort_keys=True).encode())
    columns: dict[str, Columns] = {}
    for table, data in tables.items():
        (batch,) = data.combine_chunks().to_batches()
        columns[table] = {name: to_numpy(batch[name]).copy() for name in batch.schema.names}
        for values in columns[table].values():
            digest.update(values.tobytes())
    whole = replace(manifest, status=Status.COMPLETE)
    predictions = None if said is None else prediction_table(said)
    return assemble(MEMORY, whole, digest.hexdigest(), columns, predictions)


def select_requests(trace: Trace, requests: Sequence[int]) -> Trace:
    """Return the trace of some requests only; forwards are numbered anew, in the same order."""
    unknown = sorted(set(requests) - set(trace.requests))
    if unknown or not requests:
        raise TraceError(
            f"{trace.path}: no request {unknown[0] if unknown else '(none chosen)'}; it has "
            f"requests {trace.requests[0]} to {trace.requests[-1]}"
        )
    kept = np.isin(trace.forwards.request, np.array(list(requests), dtype=np.uint32))
    number = (np.cumsum(kept) - 1).astype(np.uint32)
    forwards = _take(trace.forwards, kept, but=("token_offsets",))
    digest = hashlib.sha256(f"{trace.hash} {sorted(set(requests))}".encode())
    return replace(
        trace,
        hash=digest.hexdigest(),
        forwards=ForwardTable(**forwards, token_offsets=offsets_of(forwards["tokens"])),
        tokens=TokenTable(**_take(trace.tokens, np.repeat(kept, trace.forwards.tokens))),
        routing=RoutingTable(**_renumbered(trace.routing, kept, number)),
        predictions=trace.predictions and _predictions(trace.predictions, kept, number),
        scores=trace.scores and ScoreTable(**_renumbered(trace.scores, kept, number)),
    )


def _predictions(
    table: PredictionTable, kept: Bools, number: NDArray[np.uint32]
) -> PredictionTable:
    rows = kept[table.forward]
    lengths = np.diff(table.offsets)
    entries = np.repeat(rows, lengths)
    columns = _take(table, rows, but=("offsets", "expert_ids", "scores", "names"))
    columns["forward"] = number[columns["forward"]]
    return PredictionTable(
        **columns,
        offsets=offsets_of(lengths[rows]),
        expert_ids=table.expert_ids[entries],
        scores=table.scores[entries],
        names=table.names,
    )


def _renumbered(
    table: RoutingTable | ScoreTable, kept: Bools, number: NDArray[np.uint32]
) -> dict[str, Any]:
    columns = _take(table, kept[table.forward])
    columns["forward"] = number[columns["forward"]]
    return columns


def _take(table: Any, rows: Bools, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Take chosen rows of a table's columns; a missing optional column stays None."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    return {
        name: None if column is None else column[rows]
        for name, column in columns.items()
        if name not in but
    }
