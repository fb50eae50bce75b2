"""The rules about the optional tables of predictions and router scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oled.trace.check.counts import Expected
from oled.trace.check.report import Collector, RowGroup
from oled.trace.files import Columns, batches, row_groups
from oled.trace.manifest import Manifest, Part
from oled.trace.schema import NO_EXPERT
from oled.types import ExpertIds, Floats

RULE = "side_tables"


def check_scores(
    folder: Path, manifest: Manifest, part: Part, expected: Expected, found: Collector
) -> None:
    """Check for known places, ids in range and finite values."""
    for columns, start in row_groups(folder, part, manifest.geometry.top_k):
        rows = RowGroup(
            found,
            part.file,
            start,
            columns["forward"].astype(np.int64),
            columns["layer"].astype(np.int64),
            columns["token"].astype(np.int64),
        )
        _check_score_rows(rows, columns, manifest, expected)


def _check_score_rows(
    rows: RowGroup, columns: Columns, manifest: Manifest, expected: Expected
) -> None:
    place, _ = expected.places(rows, np.array(manifest.geometry.moe_layers))
    limit = np.array(manifest.geometry.experts_per_layer)[place] + manifest.geometry.zero_experts
    ids = columns["expert_ids"]
    outside = (ids >= limit[:, None]) & (ids != NO_EXPERT)
    rows.report(
        RULE,
        outside.any(axis=1),
        lambda i: f"score of expert {ids[i][outside[i]][0]}, the layer has 0..{limit[i] - 1}",
        lambda i: ids[i][outside[i]][0],
    )
    for name in ("values", "biased"):
        if name in columns:
            _check_finite(rows, ids, columns[name])


def _check_finite(rows: RowGroup, ids: ExpertIds, values: Floats) -> None:
    wrong = (ids != NO_EXPERT) & ~np.isfinite(values)
    rows.report(
        RULE,
        wrong.any(axis=1),
        lambda i: f"score of expert {ids[i][wrong[i]][0]} is not finite",
        lambda i: values[i][wrong[i]][0],
    )


def check_predictions(
    folder: Path, manifest: Manifest, part: Part, expected: Expected, found: Collector
) -> None:
    """Check places, targets, numbers of ids and scores, ranges, and finite scores."""
    for batch, start in batches(folder, part, manifest.geometry.top_k):
        _check_prediction_rows(pa.table(batch), start, part, manifest, expected, found)


def _check_prediction_rows(
    data: pa.Table,
    start: int,
    part: Part,
    manifest: Manifest,
    expected: Expected,
    found: Collector,
) -> None:
    forward = data.column("forward").to_numpy().astype(np.int64)
    layer = data.column("layer").to_numpy().astype(np.int64)
    target = data.column("target").to_numpy().astype(np.int64)
    rows = RowGroup(found, part.file, start, forward, layer)
    layers = np.array(manifest.geometry.moe_layers)
    expected.places(rows, layers)
    astray = ~np.isin(target, layers)
    rows.report(RULE, astray, lambda i: f"layer {target[i]} is no MoE layer", lambda i: target[i])
    place = np.minimum(np.searchsorted(layers, target), len(layers) - 1)
    limit = np.array(manifest.geometry.experts_per_layer)[place]
    ids, scores = data.column("expert_ids"), data.column("scores")
    lengths = pc.list_value_length(ids).to_numpy()
    uneven = lengths != pc.list_value_length(scores).to_numpy()
    rows.report(RULE, uneven, lambda i: "ids and scores differ in number", lambda i: lengths[i])
    owner = np.repeat(np.arange(len(forward)), lengths)
    flat = pc.list_flatten(ids).to_numpy()
    outside = np.zeros(len(forward), dtype=bool)
    outside[owner[flat >= limit[owner]]] = True
    rows.report(
        RULE,
        outside,
        lambda i: f"an expert id is above the {limit[i]} experts of layer {target[i]}",
        lambda i: ids[i].as_py(),
    )
    infinite = np.zeros(len(forward), dtype=bool)
    if not uneven.any():
        infinite[owner[~np.isfinite(pc.list_flatten(scores).to_numpy())]] = True
    rows.report(RULE, infinite, lambda i: "a score is not finite", lambda i: scores[i].as_py())
