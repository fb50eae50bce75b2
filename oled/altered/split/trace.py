"""The trace of a model's paths, from a trace of its experts; streamed.

What the model routed stays as it is: a token's experts are the projections of its paths, and their
sources, each once, its expansions; weights of paths that share an expansion add up there. As both
are known as soon as the router has spoken, each expansion layer's rows are followed by a prediction
of what the projection layer behind it will need, which is exact.

Letters: R routing rows of a window, k experts a token.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oled.altered.split.plan import PathPlan
from oled.errors import UserError
from oled.trace.files import Columns, to_numpy
from oled.trace.manifest import Manifest
from oled.trace.parts import PartFolder, new_folder
from oled.trace.reader import prediction_table
from oled.trace.rows import table_of
from oled.trace.schema import NO_EXPERT, Geometry, TokenState
from oled.trace.stream import TraceStream
from oled.trace.tables import (
    FORWARDS,
    PREDICTIONS,
    ROUTING,
    TOKENS,
    RoutingTable,
    Trace,
    arrow_schema,
)
from oled.trace.writer import ROWS_PER_PART
from oled.types import Ints

SAME_ROUTING = "same_routing"
"""The predictor of projections: the router has spoken already."""
PATHS = "paths"
"""`kind` of such a trace's provenance."""


def split_geometry(geometry: Geometry, plan: PathPlan) -> Geometry:
    """Return a geometry of two MoE layers for each: expansions (2/3 of the bytes), projections.

    Raises UserError where experts do not divide, or where the plan is of another model.
    """
    if geometry.expert_parts != 1:
        raise UserError("the trace holds parts of experts already")
    if geometry.zero_experts:
        raise UserError("experts that compute nothing can not be split")
    if tuple(map(len, plan.sources)) != geometry.experts_per_layer:
        raise UserError("the paths are of a model with other layers or experts than the trace")
    if min(plan.expansions) < geometry.top_k:
        raise UserError(f"a layer keeps {min(plan.expansions)} expansions, fewer than its top-k")
    first = [layer + place for place, layer in enumerate(geometry.moe_layers)]
    pairs = zip(plan.expansions, geometry.experts_per_layer, strict=True)
    return replace(
        geometry,
        moe_layers=tuple(layer + part for layer in first for part in (0, 1)),
        experts_per_layer=tuple(number for pair in pairs for number in pair),
        expert_bytes=tuple(
            part for size in geometry.expert_bytes for part in (size - size // 3, size // 3)
        ),
        num_layers=geometry.num_layers + len(geometry.moe_layers),
        expert_parts=2,
    )


def split_plan(trace: Trace) -> str | None:
    """Return in words how the paths of a trace of split experts were chosen; None of any other."""
    about = trace.manifest.provenance
    if about.get("kind") != PATHS:
        return None
    return str(about["plan"]["how"])


def write_split_trace(source: str | Path, destination: str | Path, plan: PathPlan) -> Path:
    """Write the trace of split experts, without predictions and scores of whole experts.

    Raises UserError as `split_geometry` does, and for forwards without routing.
    """
    stream = TraceStream.open(source)
    name = stream.folder.resolve().name
    manifest = _manifest(stream.manifest, plan, {"of": name, "hash": stream.hash})
    cursor, geometry = stream.cursor(ROUTING), stream.manifest.geometry
    idle = stream.tokens["state"] == TokenState.PAD
    with new_folder(destination) as place:
        folder, pending = PartFolder(place, manifest), 0
        for begin, end in stream.windows():
            rows = cursor.take(end)
            if rows is None:
                raise UserError(f"{stream.folder}: forwards {begin} to {end - 1} have no routing")
            parts = _split(geometry, plan, _columns(rows), stream.token_offsets, idle)
            tables = _window(stream, begin, end) | parts
            folder.write(tables)
            pending += tables[ROUTING].num_rows
            if pending >= ROWS_PER_PART:
                folder.close_part()
                pending = 0
        folder.complete()
    return Path(destination)


def split_trace(trace: Trace, plan: PathPlan) -> Trace:
    """Return the trace of split experts of a trace in memory."""
    manifest = _manifest(trace.manifest, plan, {"of": trace.path.name, "hash": trace.hash})
    routing = {field.name: getattr(trace.routing, field.name) for field in fields(trace.routing)}
    idle = trace.tokens.state == TokenState.PAD
    tables = _split(trace.geometry, plan, routing, trace.forwards.token_offsets, idle)
    digest = hashlib.sha256(f"{trace.hash} {plan.digest}".encode())
    return replace(
        trace,
        manifest=manifest,
        hash=digest.hexdigest(),
        routing=RoutingTable(**_columns(tables[ROUTING])),
        predictions=prediction_table(tables[PREDICTIONS]),
        scores=None,
    )


def _manifest(about: Manifest, plan: PathPlan, origin: dict[str, Any]) -> Manifest:
    geometry = split_geometry(about.geometry, plan)
    parts = zip(geometry.moe_layers[::2], geometry.moe_layers[1::2], strict=True)
    renamed = dict(zip(about.geometry.moe_layers, parts, strict=True))
    provenance = {
        "kind": PATHS,
        **origin,
        "expansions": list(plan.expansions),
        "plan": {"how": plan.how, **plan.about},
        "source": about.provenance,
    }
    gaps = tuple(replace(gap, layer=part) for gap in about.gaps for part in renamed[gap.layer])
    return replace(about, geometry=geometry, gaps=gaps, provenance=provenance)


def _window(stream: TraceStream, begin: int, end: int) -> dict[str, pa.Table]:
    """Return forwards and tokens as they were."""
    tokens = slice(stream.token_offsets[begin], stream.token_offsets[end])
    forwards: Columns = {name: values[begin:end] for name, values in stream.forwards.items()}
    return {
        FORWARDS: table_of(arrow_schema(FORWARDS, 1), forwards),
        TOKENS: table_of(
            arrow_schema(TOKENS, 1), {name: x[tokens] for name, x in stream.tokens.items()}
        ),
    }


def _split(
    geometry: Geometry,
    plan: PathPlan,
    columns: Columns,
    token_offsets: Ints,
    idle: NDArray[np.bool_],
) -> dict[str, pa.Table]:
    """Return the routing of both parts, and what the first predicts about the second.

    columns: of the routing rows; token_offsets [F+1] and idle [N] (pads) of all forwards.
    """
    ids, weights = columns["expert_ids"].astype(np.int64), columns["weights"]
    place = np.searchsorted(geometry.moe_layers, columns["layer"])
    expansion = np.full_like(ids, NO_EXPERT)
    for index in range(len(geometry.moe_layers)):
        here = (place == index)[:, None] & (ids != NO_EXPERT)
        expansion[here] = plan.numbered(index)[ids[here]]
    shared_ids, shared_weights = share_expansions(expansion, weights)
    layer = columns["layer"].astype(np.int64) + place
    both: Columns = {
        name: np.concatenate((columns[name], columns[name])) for name in ("forward", "token")
    }
    both |= {
        "layer": np.concatenate((layer, layer + 1)),
        "expert_ids": np.concatenate((shared_ids, ids)),
        "weights": np.concatenate((shared_weights, weights)),
    }
    order = np.lexsort((both["token"], both["layer"], both["forward"]))
    routing = table_of(
        arrow_schema(ROUTING, geometry.top_k), {name: x[order] for name, x in both.items()}
    )
    row = token_offsets[columns["forward"]] + columns["token"]
    active = (ids != NO_EXPERT) & ~idle[row, None]
    predicted = _predictions(columns["forward"].astype(np.int64), layer, ids, weights, active)
    return {ROUTING: routing, PREDICTIONS: predicted}


def share_expansions(
    expansion: Ints, weights: NDArray[np.float32]
) -> tuple[Ints, NDArray[np.float32]]:
    """Return each expansion of a token once, by first mention, weights added up: [R, k]."""
    slots = np.arange(expansion.shape[1])
    first = np.argmax(expansion[:, :, None] == expansion[:, None, :], axis=2)  # [R, k]
    total = np.zeros(weights.shape, np.float64)
    np.add.at(total, (np.arange(len(weights))[:, None], first), weights)
    kept = (first == slots) & (expansion != NO_EXPERT)
    order = np.argsort(~kept, axis=1, kind="stable")
    kept = np.take_along_axis(kept, order, axis=1)
    ids = np.where(kept, np.take_along_axis(expansion, order, axis=1), NO_EXPERT)
    summed = np.where(kept, np.take_along_axis(total, order, axis=1), 0.0)
    return ids, summed.astype(np.float32)


def _predictions(
    forward: Ints, layer: Ints, ids: Ints, weights: NDArray[np.float32], active: NDArray[np.bool_]
) -> pa.Table:
    """Return each layer-step's projections with their summed weights, most wanted first."""
    step, place = np.unique(forward << 16 | layer, return_inverse=True)
    key = (place[:, None] << 16 | ids)[active]
    entry, which = np.unique(key, return_inverse=True)
    score = np.bincount(which, weights[active])
    order = np.lexsort((-score, entry >> 16))
    owner, expert = (entry >> 16)[order], (entry & 0xFFFF)[order]
    used, counts = np.unique(owner, return_counts=True)
    schema = arrow_schema(PREDICTIONS, 1)
    ends = pa.array(np.concatenate(([0], np.cumsum(counts))), pa.int32())
    lists = {"expert_ids": expert.astype(np.uint16), "scores": score[order].astype(np.float32)}
    columns: dict[str, Any] = {
        "forward": pa.array((step[used] >> 16).astype(np.uint32)),
        "layer": pa.array((step[used] & 0xFFFF).astype(np.uint16)),
        "target": pa.array(((step[used] & 0xFFFF) + 1).astype(np.uint16)),
        "predictor": pa.array([SAME_ROUTING] * len(used), pa.string()),
    }
    for name, values in lists.items():
        columns[name] = pa.ListArray.from_arrays(
            ends, pa.array(values), type=schema.field(name).type
        )
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _columns(data: pa.Table) -> Columns:
    (batch,) = data.combine_chunks().to_batches()
    return {name: to_numpy(batch[name]) for name in batch.schema.names}
