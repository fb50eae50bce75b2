"""From forward records to Arrow tables of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from oled.trace.errors import TraceError
from oled.trace.schema import ForwardRecord
from oled.trace.tables import FORWARDS, PREDICTIONS, ROUTING, SCORES, TOKENS, arrow_schema
from oled.types import Array

Columns = dict[str, Array]


def record_tables(first: int, records: Sequence[ForwardRecord], top_k: int) -> dict[str, pa.Table]:
    """Return the rows of consecutive records, the first being forward `first`; no empty tables."""
    numbered = list(enumerate(records, first))
    tables = {
        FORWARDS: table_of(arrow_schema(FORWARDS, top_k), _forward_columns(numbered)),
        TOKENS: table_of(arrow_schema(TOKENS, top_k), _token_columns(numbered)),
    }
    routing = [_routing_rows(forward, record) for forward, record in numbered]
    if any(len(rows["forward"]) for rows in routing):
        tables[ROUTING] = table_of(arrow_schema(ROUTING, top_k), _join(routing))
    scores = [_score_rows(forward, record) for forward, record in numbered if record.scores]
    if scores:
        columns = _join(scores)
        width = columns["expert_ids"].shape[1]
        schema = arrow_schema(SCORES, top_k, width=width, biased="biased" in columns)
        tables[SCORES] = table_of(schema, columns)
    if any(record.predictions for record in records):
        tables[PREDICTIONS] = _prediction_table(numbered, top_k)
    return tables


def _routing_rows(forward: int, record: ForwardRecord) -> Columns:
    columns = {"expert_ids": record.expert_ids, "weights": record.weights}
    return _rows(forward, record, columns)


def _score_rows(forward: int, record: ForwardRecord) -> Columns:
    scores = record.scores
    if scores is None:
        raise ValueError("a record without scores has no score rows")
    columns = {"expert_ids": scores.expert_ids, "values": scores.values}
    if scores.biased is not None:
        columns["biased"] = scores.biased
    return _rows(forward, record, columns)


def _rows(forward: int, record: ForwardRecord, columns: Columns) -> Columns:
    """Take the (layer, token) pairs that have rows from columns [Lr, T, …]."""
    mask = record.row_mask()
    layer, token = np.nonzero(mask)
    return {
        "forward": np.full(len(layer), forward, dtype=np.uint32),
        "layer": record.layers[layer],
        "token": token,
        **{name: values[mask] for name, values in columns.items()},
    }


def _forward_columns(numbered: Sequence[tuple[int, ForwardRecord]]) -> Columns:
    rows = [
        (
            forward,
            record.request,
            record.pass_id,
            int(record.phase),
            record.block,
            record.step,
            len(record.positions),
            record.context,
            int(record.accepted.sum()),
            record.produced,
            record.measured_ns,
        )
        for forward, record in numbered
    ]
    columns = np.array(rows, dtype=np.int64).T
    return dict(zip(arrow_schema(FORWARDS, 1).names, columns, strict=True))


def _token_columns(numbered: Sequence[tuple[int, ForwardRecord]]) -> Columns:
    counts = [len(record.positions) for _, record in numbered]
    records = [record for _, record in numbered]
    return {
        "forward": np.repeat([forward for forward, _ in numbered], counts),
        "token": np.concatenate([np.arange(count) for count in counts]),
        "request": np.repeat([record.request for record in records], counts),
        "position": np.concatenate([record.positions for record in records]),
        "token_id": np.concatenate([record.token_ids for record in records]),
        "confidence": np.concatenate([record.confidence for record in records]),
        "state": np.concatenate([record.state for record in records]),
        "accepted": np.concatenate([record.accepted for record in records]),
    }


def _prediction_table(numbered: Sequence[tuple[int, ForwardRecord]], top_k: int) -> pa.Table:
    said = [
        (forward, prediction) for forward, record in numbered for prediction in record.predictions
    ]
    ends = np.cumsum([0] + [len(prediction.expert_ids) for _, prediction in said])
    schema = arrow_schema(PREDICTIONS, top_k)
    lists = {
        "expert_ids": np.concatenate([p.expert_ids for _, p in said]),
        "scores": np.concatenate([p.scores for _, p in said]).astype(np.float32),
    }
    columns: dict[str, Any] = {
        "forward": pa.array([forward for forward, _ in said], pa.uint32()),
        "layer": pa.array([prediction.layer for _, prediction in said], pa.uint16()),
        "target": pa.array([prediction.target for _, prediction in said], pa.uint16()),
        "predictor": pa.array([prediction.predictor for _, prediction in said], pa.string()),
    }
    for name, values in lists.items():
        columns[name] = pa.ListArray.from_arrays(
            pa.array(ends, pa.int32()), pa.array(values), type=schema.field(name).type
        )
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _join(rows: Sequence[Columns]) -> Columns:
    if any(set(columns) != set(rows[0]) for columns in rows):
        raise TraceError("some forwards carry biased router scores and others do not")
    return {name: np.concatenate([columns[name] for columns in rows]) for name in rows[0]}


def table_of(schema: pa.Schema, columns: Columns) -> pa.Table:
    """Make an Arrow table of arrays, cast to the schema; refuse what does not fit."""
    return pa.table([_array(field, columns[field.name]) for field in schema], schema=schema)


def _array(field: pa.Field, column: Array) -> pa.Array:
    values = field.type.value_type if pa.types.is_fixed_size_list(field.type) else field.type
    flat = pa.array(_cast(field.name, column.reshape(-1), np.dtype(values.to_pandas_dtype())))
    if values is field.type:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, type=field.type)


def _cast(name: str, column: Array, dtype: np.dtype[Any]) -> Array:
    """Cast, but refuse to wrap integers around."""
    if dtype.kind in "iu" and column.dtype != dtype and column.size:
        limits = np.iinfo(dtype)
        low, high = int(column.min()), int(column.max())
        if low < limits.min or high > limits.max:
            bad = low if low < limits.min else high
            raise TraceError(f"'{name}' {bad} does not fit {limits.min}..{limits.max}")
    return column.astype(dtype, copy=False)
