"""The long view: one row for each (forward, layer, token, slot), for tools that group and join."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.files import Columns, to_numpy
from oled.trace.schema import NO_EXPERT, Phase, TokenState
from oled.trace.stream import TraceStream
from oled.trace.tables import ROUTING
from oled.types import Array, Bools, Ints

LONG_SCHEMA = pa.schema(
    [
        pa.field("request", pa.uint32(), nullable=False),
        pa.field("forward", pa.uint32(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("block", pa.int32()),
        pa.field("step", pa.int32()),
        pa.field("layer", pa.uint16(), nullable=False),
        pa.field("token", pa.uint16(), nullable=False),
        pa.field("position", pa.uint32(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("confidence", pa.float32()),
        pa.field("slot", pa.uint16(), nullable=False),
        pa.field("expert", pa.uint16(), nullable=False),
        pa.field("weight", pa.float32()),
    ]
)
"""What is unknown (block, step, confidence, weight) is null."""


def long_batches(stream: TraceStream) -> Iterator[pa.RecordBatch]:
    """Yield the long view of a whole trace, a window at a time."""
    cursor = stream.cursor(ROUTING)
    for _, end in stream.windows():
        rows = cursor.take(end)
        if rows is not None:
            yield _long(stream, rows)


def token_rows(stream: TraceStream, rows: Columns) -> Ints:
    """Return the place of each routing row's token in the token table: i64[R]."""
    forward = rows["forward"]
    if (rows["token"] >= stream.forwards["tokens"][forward]).any():
        raise TraceError(f"{stream.folder}: a row names an unknown token; run `oled check` on it")
    return np.asarray(stream.token_offsets[forward] + rows["token"])


def _active_entries(stream: TraceStream, rows: Columns) -> tuple[Ints, Ints, Ints]:
    """Return row, slot and dense layer of entries that load an expert: no pads or zero experts."""
    geometry = stream.manifest.geometry
    layers = np.array(geometry.moe_layers)
    place = np.minimum(np.searchsorted(layers, rows["layer"]), len(layers) - 1)
    if (layers[place] != rows["layer"]).any():
        raise TraceError(f"{stream.folder}: a row names no MoE layer; run `oled check` on it")
    real = stream.tokens["state"][token_rows(stream, rows)] != TokenState.PAD
    limit = np.where(real, np.array(geometry.experts_per_layer)[place], 0)
    row, slot = np.nonzero(rows["expert_ids"] < limit[:, None])
    return row, slot, place[row].astype(np.int64)


def active_windows(stream: TraceStream) -> Iterator[tuple[Columns, Ints]]:
    """Yield entries that load an expert, a window of whole forwards at a time, in order.

    Yields the columns forward, expert (i64) and weight, and the dense layer of each: [n].
    """
    cursor = stream.cursor(ROUTING)
    for _, end in stream.windows():
        table = cursor.take(end)
        if table is None:
            continue
        rows = columns_of(table)
        row, slot, place = _active_entries(stream, rows)
        columns = {
            "forward": rows["forward"][row].astype(np.int64),
            "expert": rows["expert_ids"][row, slot].astype(np.int64),
            "weight": rows["weights"][row, slot],
        }
        yield columns, place


def distinct(keys: Ints) -> Ints:
    """Return each key once, ascending, by sorting: `np.unique` hashes, which is slow here."""
    ordered = np.sort(keys)
    new = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    return np.asarray(ordered[new])


def columns_of(table: pa.Table) -> Columns:
    """Return Arrow rows as arrays."""
    (batch,) = table.combine_chunks().to_batches()
    return {name: to_numpy(batch[name]) for name in batch.schema.names}


def _long(stream: TraceStream, table: pa.Table) -> pa.RecordBatch:
    rows = columns_of(table)
    row, slot = np.nonzero(rows["expert_ids"] != NO_EXPERT)
    forward = rows["forward"][row]
    token = token_rows(stream, rows)[row]
    forwards, tokens = stream.forwards, stream.tokens
    weight = rows["weights"][row, slot]
    columns = {
        "request": forwards["request"][forward],
        "forward": forward,
        "phase": _words(Phase, forwards["phase"][forward]),
        "block": _known(forwards["block"][forward], forwards["block"][forward] >= 0),
        "step": _known(forwards["step"][forward], forwards["step"][forward] >= 0),
        "layer": rows["layer"][row],
        "token": rows["token"][row],
        "position": tokens["position"][token],
        "state": _words(TokenState, tokens["state"][token]),
        "confidence": _known(tokens["confidence"][token], ~np.isnan(tokens["confidence"][token])),
        "slot": slot.astype(np.uint16),
        "expert": rows["expert_ids"][row, slot],
        "weight": _known(weight, np.full(len(weight), stream.manifest.has_weights)),
    }
    arrays = [pa.array(columns[field.name], field.type) for field in LONG_SCHEMA]
    return pa.record_batch(arrays, schema=LONG_SCHEMA)


def _known(values: Array, known: Bools) -> pa.Array:
    """Return an array with nulls where a value is not known."""
    return pa.array(values, mask=~known)


def _words(kind: type[IntEnum], codes: NDArray[np.uint8]) -> pa.Array:
    """Return names of an enumeration, in small letters."""
    names = pa.array([member.name.lower() for member in kind])
    return names.take(pa.array(codes))
