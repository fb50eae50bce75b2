"""Copying forwards from one trace into another, renumbered, some layers only; streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from oled.trace.files import Columns
from oled.trace.parts import PartFolder
from oled.trace.rows import table_of
from oled.trace.stream import TraceStream
from oled.trace.tables import FORWARDS, PREDICTIONS, ROUTING, SCORES, TOKENS, arrow_schema
from oled.trace.writer import ROWS_PER_PART
from oled.types import Array, Bools, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """What to take from a stream, and under which numbers."""

    stream: TraceStream
    kept: Bools  # [F]
    request: Ints  # [F] as it will be called
    pass_id: Ints  # [F] as it will be called
    layers: tuple[int, ...]  # absolute
    side_tables: tuple[str, ...] = (SCORES, PREDICTIONS)


def copy_forwards(copies: Sequence[Copy], folder: PartFolder) -> int:
    """Write the forwards of each copy in turn; return how many routing rows that were."""
    first = rows = pending = 0
    for copy in copies:
        stream = copy.stream
        new = np.cumsum(copy.kept) - 1 + first
        tables = [ROUTING, *(table for table in copy.side_tables if stream.has(table))]
        cursors = {table: stream.cursor(table) for table in tables}
        for begin, end in stream.windows():
            found = _forward_tables(copy, new, begin, end)
            for table, cursor in cursors.items():
                data = cursor.take(end)
                if data is not None and (data := _chosen(copy, new, data)).num_rows:
                    found[table] = data
            if FORWARDS not in found:
                continue
            folder.write(found)
            pending += found[ROUTING].num_rows if ROUTING in found else 0
            if pending >= ROWS_PER_PART:
                folder.close_part()
                rows, pending = rows + pending, 0
        first += int(copy.kept.sum())
    return rows + pending


def _forward_tables(copy: Copy, new: Array, begin: int, end: int) -> dict[str, pa.Table]:
    """Return the forwards and tokens of a window; nothing where none is kept."""
    kept = np.flatnonzero(copy.kept[begin:end]) + begin
    if not len(kept):
        return {}
    stream = copy.stream
    forwards: Columns = {name: values[kept] for name, values in stream.forwards.items()}
    forwards |= {
        "forward": new[kept],
        "request": copy.request[kept],
        "pass_id": copy.pass_id[kept],
    }
    here = slice(stream.token_offsets[begin], stream.token_offsets[end])
    rows = np.repeat(copy.kept[begin:end], stream.forwards["tokens"][begin:end])
    tokens: Columns = {name: values[here][rows] for name, values in stream.tokens.items()}
    owner = np.repeat(kept, stream.forwards["tokens"][kept])
    tokens |= {"forward": new[owner], "request": copy.request[owner]}
    return {
        FORWARDS: table_of(arrow_schema(FORWARDS, 1), forwards),
        TOKENS: table_of(arrow_schema(TOKENS, 1), tokens),
    }


def _chosen(copy: Copy, new: Array, data: pa.Table) -> pa.Table:
    """Choose rows of kept forwards and layers, and renumber them."""
    forward = data.column("forward").to_numpy()
    keep = copy.kept[forward]
    for name in ("layer", "target"):
        if name in data.column_names:
            keep &= np.isin(data.column(name).to_numpy(), np.array(copy.layers, dtype=np.uint16))
    data = data.filter(pa.array(keep)).combine_chunks()
    number = pa.array(new[forward[keep]].astype(np.uint32))
    return data.set_column(0, data.schema.field("forward"), number)
