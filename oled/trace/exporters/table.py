"""The long view as a Parquet or CSV file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from oled.trace.longform import LONG_SCHEMA, long_batches
from oled.trace.options import Options
from oled.trace.stream import TraceStream

FLOATS = {"confidence": "BYTE_STREAM_SPLIT", "weight": "BYTE_STREAM_SPLIT"}


def to_parquet(stream: TraceStream, path: Path, options: Options) -> None:
    """Write one row group a window."""
    plain = [name for name in LONG_SCHEMA.names if name not in FLOATS]
    with pq.ParquetWriter(
        path, LONG_SCHEMA, compression="zstd", use_dictionary=plain, column_encoding=FLOATS
    ) as writer:
        for batch in long_batches(stream):
            writer.write_batch(batch)


def to_csv(stream: TraceStream, path: Path, options: Options) -> None:
    """Write a header, then a line a row; what is unknown is empty."""
    with pa.csv.CSVWriter(path, LONG_SCHEMA) as writer:
        for batch in long_batches(stream):
            writer.write_batch(batch)
