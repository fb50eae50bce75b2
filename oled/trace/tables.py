"""A trace in memory: contiguous, writable NumPy columns, and their Parquet schemas.

F forwards, `tokens` all tokens of all forwards, R routing rows, k top-k, m kept scores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oled.trace.manifest import Manifest
from oled.trace.migrate import SCHEMA_VERSION
from oled.trace.schema import Geometry
from oled.types import ExpertIds, Floats, Ints

ROUTING, FORWARDS, TOKENS = "routing", "forwards", "tokens"
PREDICTIONS, SCORES = "predictions", "scores"
REQUIRED_TABLES = (ROUTING, FORWARDS, TOKENS)
TABLES = (*REQUIRED_TABLES, PREDICTIONS, SCORES)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardTable:
    """One entry per forward (one request's share of a model pass), in recorded order."""

    request: NDArray[np.uint32]  # [F]
    pass_id: NDArray[np.uint32]  # [F] rows of a batch share it
    phase: NDArray[np.uint8]  # [F] Phase
    block: NDArray[np.int32]  # [F] -1 none
    step: NDArray[np.int32]  # [F] -1 none
    tokens: ExpertIds  # [F]
    context: NDArray[np.int32]  # [F] tokens cached before
    accepted: ExpertIds  # [F]
    produced: ExpertIds  # [F]
    measured_ns: Ints  # [F] -1 not measured
    token_offsets: Ints  # [F+1] rows of a forward in the token table


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """One entry per (forward, token)."""

    position: NDArray[np.uint32]  # [tokens]
    token_id: NDArray[np.int32]  # [tokens] -1 unknown
    confidence: Floats  # [tokens] NaN unknown
    state: NDArray[np.uint8]  # [tokens] TokenState
    accepted: NDArray[np.uint8]  # [tokens]


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTable:
    """One entry per (forward, layer, token)."""

    forward: NDArray[np.uint32]  # [R]
    layer: ExpertIds  # [R] absolute
    token: ExpertIds  # [R] place in the forward
    expert_ids: ExpertIds  # [R, k], NO_EXPERT unused
    weights: Floats  # [R, k] as applied


@dataclass(frozen=True, slots=True, eq=False)
class PredictionTable:
    """One entry per (forward, layer, target layer, predictor), with its experts in CSR form."""

    forward: NDArray[np.uint32]  # [P]
    layer: ExpertIds  # [P] absolute: where it was said
    target: ExpertIds  # [P] absolute: what it is about
    predictor: NDArray[np.uint8]  # [P] index into `names`
    offsets: Ints  # [P+1]
    expert_ids: ExpertIds  # [offsets[-1]]
    scores: Floats  # [offsets[-1]]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTable:
    """Router scores, one entry per (forward, layer, token)."""

    forward: NDArray[np.uint32]  # [Q]
    layer: ExpertIds  # [Q] absolute
    token: ExpertIds  # [Q]
    expert_ids: ExpertIds  # [Q, m]
    values: Floats  # [Q, m]
    biased: Floats | None  # [Q, m]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A loaded trace."""

    path: Path
    manifest: Manifest
    hash: str  # of the parts' checksums and the geometry
    forwards: ForwardTable
    tokens: TokenTable
    routing: RoutingTable
    predictions: PredictionTable | None = None
    scores: ScoreTable | None = None

    @property
    def geometry(self) -> Geometry:
        """The model's shape."""
        return self.manifest.geometry

    @property
    def num_forwards(self) -> int:
        """F."""
        return len(self.forwards.request)

    @property
    def requests(self) -> tuple[int, ...]:
        """Request ids, ascending."""
        return tuple(int(request) for request in np.unique(self.forwards.request))


FORWARD_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("request", pa.uint32()),
    ("pass_id", pa.uint32()),
    ("phase", pa.uint8()),
    ("block", pa.int32()),
    ("step", pa.int32()),
    ("tokens", pa.uint16()),
    ("context", pa.int32()),
    ("accepted", pa.uint16()),
    ("produced", pa.uint16()),
    ("measured_ns", pa.int64()),
)
TOKEN_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("position", pa.uint32()),
    ("token_id", pa.int32()),
    ("confidence", pa.float32()),
    ("state", pa.uint8()),
    ("accepted", pa.uint8()),
)
ROW_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("forward", pa.uint32()),
    ("layer", pa.uint16()),
    ("token", pa.uint16()),
)


def fixed_list(values: pa.DataType, size: int) -> pa.DataType:
    """Return `fixed_size_list<values>[size]` without nulls."""
    return pa.list_(pa.field("element", values, nullable=False), size)


def varied_list(values: pa.DataType) -> pa.DataType:
    """Return `list<values>` without nulls."""
    return pa.list_(pa.field("element", values, nullable=False))


def arrow_schema(table: str, top_k: int, *, width: int = 0, biased: bool = False) -> pa.Schema:
    """Return the columns of a table; `width` is m, `biased` tells of biased scores."""
    columns: tuple[tuple[str, pa.DataType], ...]
    match table:
        case "routing":
            columns = (
                *ROW_COLUMNS,
                ("expert_ids", fixed_list(pa.uint16(), top_k)),
                ("weights", fixed_list(pa.float32(), top_k)),
            )
        case "forwards":
            columns = (("forward", pa.uint32()), *FORWARD_COLUMNS)
        case "tokens":
            columns = (
                ("forward", pa.uint32()),
                ("token", pa.uint16()),
                ("request", pa.uint32()),
                *TOKEN_COLUMNS,
            )
        case "predictions":
            columns = (
                ("forward", pa.uint32()),
                ("layer", pa.uint16()),
                ("target", pa.uint16()),
                ("predictor", pa.string()),
                ("expert_ids", varied_list(pa.uint16())),
                ("scores", varied_list(pa.float32())),
            )
        case "scores":
            columns = (
                *ROW_COLUMNS,
                ("expert_ids", fixed_list(pa.uint16(), width)),
                ("values", fixed_list(pa.float32(), width)),
            )
            if biased:
                columns = (*columns, ("biased", fixed_list(pa.float32(), width)))
        case _:
            raise ValueError(f"no table '{table}'")
    note: Any = {"schema_version": SCHEMA_VERSION, "table": table}
    return pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in columns],
        metadata={"oled": json.dumps(note)},
    )
