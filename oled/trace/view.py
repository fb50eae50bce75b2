"""Tables of a trace for pandas, Arrow and DuckDB, with a line on each column and a query.

`long` is the view to group and join: a row for each (forward, layer, token, slot). The others are
the trace's own tables, as they lie in its Parquet files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from oled.errors import nearest
from oled.trace.errors import TraceError
from oled.trace.files import batches, inside
from oled.trace.longform import LONG_SCHEMA, long_batches
from oled.trace.manifest import Manifest
from oled.trace.reader import open_manifest
from oled.trace.stream import TraceStream
from oled.trace.tables import FORWARDS, PREDICTIONS, ROUTING, SCORES, TOKENS

LONG = "long"


@dataclass(frozen=True, slots=True)
class TableInfo:
    """What a table holds."""

    summary: str
    columns: Mapping[str, str]  # name: meaning
    query: str  # SQL, the table's name standing for it
    frame: str  # the same of its pandas data frame


_FORWARD = {"forward": "number of the forward, from 0, in recorded order"}
_PLACE = _FORWARD | {
    "layer": "absolute layer id; dense layers have no rows",
    "token": "place of the token in the forward, from 0",
}

TABLES: dict[str, TableInfo] = {
    LONG: TableInfo(
        "one row for each (forward, layer, token, slot) that names an expert",
        {
            "request": "the request the forward belongs to",
            **_FORWARD,
            "phase": "prefill, denoise, commit, decode, draft or verify",
            "block": "block of block diffusion; null where there is none",
            "step": "denoising step in the block; null where there is none",
            "layer": _PLACE["layer"],
            "token": _PLACE["token"],
            "position": "the token's position in the text",
            "state": "masked, decoded, prompt or pad, before the forward",
            "confidence": "of the token, 0 to 1; null where unknown",
            "slot": "rank of the expert among the token's choices, from 0",
            "expert": "expert id",
            "weight": "gate weight as applied; null where the source has none",
        },
        "SELECT layer, expert, count(*) AS tokens FROM long GROUP BY layer, expert "
        "ORDER BY tokens DESC, layer, expert LIMIT 10",
        'long.groupby(["layer", "expert"]).size().nlargest(10)',
    ),
    FORWARDS: TableInfo(
        "one row for each forward: one request's share of a model pass",
        {
            **_FORWARD,
            "request": "request id",
            "pass_id": "the model pass; rows of a batch share it",
            "phase": "0 prefill, 1 denoise, 2 commit, 3 decode, 4 draft, 5 verify",
            "block": "-1 none",
            "step": "denoising step in the block, -1 none",
            "tokens": "tokens of the forward",
            "context": "tokens cached before it",
            "accepted": "tokens accepted in it",
            "produced": "of these, up to and including the end token: what TPOT divides by",
            "measured_ns": "wall time of the pass, -1 where not measured",
        },
        "SELECT phase, count(*) AS forwards, sum(produced) AS tokens FROM forwards "
        "GROUP BY phase ORDER BY phase",
        'forwards.groupby("phase").agg(forwards=("tokens", "size"), tokens=("produced", "sum"))',
    ),
    TOKENS: TableInfo(
        "one row for each token of each forward",
        {
            **_FORWARD,
            "token": _PLACE["token"],
            "request": "request id",
            "position": "position in the text",
            "token_id": "input id, -1 unknown",
            "confidence": "0 to 1, NaN unknown; confidence_kind in the manifest says of what",
            "state": "0 masked, 1 decoded, 2 prompt, 3 pad, before the forward",
            "accepted": "1 where accepted in this forward",
        },
        "SELECT state, count(*) AS tokens, avg(confidence) AS confidence FROM tokens "
        "WHERE NOT isnan(confidence) GROUP BY state ORDER BY state",
        'tokens[tokens.confidence >= 0].groupby("state").confidence.agg(["size", "mean"])',
    ),
    ROUTING: TableInfo(
        "one row for each (forward, layer, token)",
        {
            **_PLACE,
            "expert_ids": "k expert ids, 65535 for unused slots",
            "weights": "k gate weights as applied; weight_kind in the manifest says their sum",
        },
        "SELECT forward, layer, count(*) AS tokens FROM routing GROUP BY forward, layer "
        "ORDER BY forward, layer LIMIT 10",
        'routing.groupby(["forward", "layer"]).size().head(10)',
    ),
    PREDICTIONS: TableInfo(
        "what a predictor said at a layer about another (optional)",
        {
            **_FORWARD,
            "layer": "where it was said",
            "target": "the layer it is about; in the next forward, if it does not lie ahead",
            "predictor": "its name",
            "expert_ids": "experts, most wanted first",
            "scores": "their summed predicted weights",
        },
        "SELECT predictor, target - layer AS ahead, count(*) AS said FROM predictions "
        "GROUP BY predictor, ahead ORDER BY predictor, ahead",
        'predictions.groupby(["predictor", predictions.target - predictions.layer]).size()',
    ),
    SCORES: TableInfo(
        "router scores of all experts or the best m (optional)",
        {
            **_PLACE,
            "expert_ids": "m expert ids",
            "values": "their scores before the selection's bias",
            "biased": "what the selection used (only where it is biased)",
        },
        "SELECT layer, count(*) AS tokens FROM scores GROUP BY layer ORDER BY layer",
        'scores.groupby("layer").size()',
    ),
}


def reader(
    path: str | Path, table: str = LONG, *, allow_partial: bool = False
) -> pa.RecordBatchReader:
    """Read a table as a stream of Arrow batches, as DuckDB and Polars do too; it is read once."""
    if table == LONG:
        stream = TraceStream.open(path, allow_partial=allow_partial)
        return pa.RecordBatchReader.from_batches(LONG_SCHEMA, long_batches(stream))
    folder, manifest = _opened(path, table, allow_partial)
    found = _stored(folder, manifest, table)
    first = next(found, None)
    if first is None:
        raise TraceError(f"{folder}: table '{table}' has no rows")
    return pa.RecordBatchReader.from_batches(first.schema, chain([first], found))


def view(path: str | Path, table: str = LONG, *, allow_partial: bool = False) -> pd.DataFrame:
    """Read a table as a data frame with Arrow types (nulls stay null, lists stay lists)."""
    data = reader(path, table, allow_partial=allow_partial).read_all()
    frame: pd.DataFrame = data.to_pandas(types_mapper=pd.ArrowDtype)
    return frame


def head(
    path: str | Path, rows: int, table: str = LONG, *, allow_partial: bool = False
) -> pa.Table:
    """Return the first rows of a table; no more is read than they need."""
    found = reader(path, table, allow_partial=allow_partial)
    taken, left = [], rows
    while left > 0 and (batch := next(iter(found), None)) is not None:
        taken.append(batch.slice(0, left))
        left -= batch.num_rows
    return pa.Table.from_batches(taken, schema=found.schema)


def dataset(path: str | Path, table: str = ROUTING, *, allow_partial: bool = False) -> ds.Dataset:
    """Open one of the trace's tables as an Arrow dataset over its files, for filters and scans."""
    if table == LONG:
        raise TraceError("the long view is no file; read it with `reader`, or export it as parquet")
    folder, manifest = _opened(path, table, allow_partial)
    files = [str(inside(folder, part.file)) for part in manifest.parts if part.table == table]
    return ds.dataset(files, format="parquet")


def describe(path: str | Path, table: str, *, allow_partial: bool = False) -> dict[str, Any]:
    """Describe a table's columns, and show the same example in SQL and in pandas."""
    about = TABLES[table]
    schema = reader(path, table, allow_partial=allow_partial).schema
    columns = [
        {"name": field.name, "type": _type_name(field.type), "meaning": about.columns[field.name]}
        for field in schema
    ]
    return {
        "table": table,
        "summary": about.summary,
        "columns": columns,
        "query": about.query,
        "frame": about.frame,
    }


def _type_name(kind: pa.DataType) -> str:
    if pa.types.is_fixed_size_list(kind):
        return f"{kind.value_type}[{kind.list_size}]"
    if pa.types.is_list(kind):
        return f"list<{kind.value_type}>"
    return str(kind)


def present(path: str | Path, *, allow_partial: bool = False) -> list[str]:
    """Name the tables that a trace has, `long` first."""
    manifest = open_manifest(Path(path), allow_partial=allow_partial)
    stored = {part.table for part in manifest.parts}
    return [LONG, *(table for table in TABLES if table in stored)]


def _opened(path: str | Path, table: str, allow_partial: bool) -> tuple[Path, Manifest]:
    if table not in TABLES:
        raise TraceError(f"there is no table '{table}'; {nearest(table, TABLES)}")
    folder = Path(path)
    manifest = open_manifest(folder, allow_partial=allow_partial)
    if all(part.table != table for part in manifest.parts):
        raise TraceError(f"{folder}: has no table '{table}'")
    return folder, manifest


def _stored(folder: Path, manifest: Manifest, table: str) -> Iterator[pa.RecordBatch]:
    for part in manifest.parts:
        if part.table == table:
            for batch, _ in batches(folder, part, manifest.geometry.top_k):
                yield batch
