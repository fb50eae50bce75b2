"""The rules about routing rows, in one streamed pass with memory for forwards, not for rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.check.counts import Expected, RowCounts
from oled.trace.check.report import Collector, Finding, RowGroup
from oled.trace.check.suspects import Suspects
from oled.trace.files import Columns, row_groups
from oled.trace.manifest import Manifest, Part
from oled.trace.schema import NO_EXPERT, Phase
from oled.trace.tables import ROUTING
from oled.types import Bools, ExpertIds

TOLERANCE = 4e-3
"""Relative, for sums of weights: bf16 weights gave sums from 0.9975 to 1.0024."""


class RoutingCheck:
    """State of the pass: the last row's place, rows of each layer, counts of the open forward."""

    def __init__(self, folder: Path, manifest: Manifest, expected: Expected, found: Collector):
        geometry = manifest.geometry
        layers = len(geometry.moe_layers)
        self._folder = folder
        self._manifest = manifest
        self._expected = expected
        self._found = found
        self._layers = np.array(geometry.moe_layers, dtype=np.int64)
        self._num_ids = np.array(geometry.experts_per_layer, dtype=np.int64) + geometry.zero_experts
        self._captured = np.zeros(layers, dtype=bool)
        self._rows_of_layer = np.zeros(layers, dtype=np.int64)
        self._counts = RowCounts(manifest, expected, found)
        self.suspects = Suspects(manifest, expected.request)
        self._previous = -1  # sort key of the last row
        self.rows = 0

    def run(self, parts: list[Part]) -> None:
        """Stream the parts, then judge what only the whole can show."""
        top_k = self._manifest.geometry.top_k
        for part in parts:
            for columns, start in row_groups(self._folder, part, top_k):
                if start == 0:
                    self._counts.begin(part.file, int(columns["forward"][0]))
                self._group(part.file, start, columns)
        self._counts.finish()
        for place in np.flatnonzero(~self._captured & (self._rows_of_layer > 0)):
            layer = int(self._layers[place])
            message = f"all {self._rows_of_layer[place]} rows have ids and weights of zero"
            self._found.add(Finding("zero_capture", ROUTING, message, None, layer, "0"))

    def _group(self, file: str, start: int, columns: Columns) -> None:
        forward = columns["forward"].astype(np.int64)
        layer = columns["layer"].astype(np.int64)
        token = columns["token"].astype(np.int64)
        ids, weights = columns["expert_ids"], columns["weights"]
        rows = RowGroup(self._found, file, start, forward, layer, token)
        self.rows += len(forward)
        key = (forward << 32) | (layer << 16) | token
        disorder = np.diff(key, prepend=self._previous) <= 0
        self._previous = int(key[-1])
        rows.report("order", disorder, lambda i: "the row does not ascend", lambda i: token[i])
        place, inside = self._expected.places(rows, self._layers)
        if disorder.any():
            self._counts.give_up()
        self._counts.add(forward[inside], place[inside], token[inside])
        self._check_ids(rows, ids, place)
        self.suspects.add(forward[inside], place[inside], token[inside], ids[inside])
        if self._manifest.has_weights:
            drafted = np.zeros(len(forward), dtype=bool)
            drafted[inside] = self._expected.phase[forward[inside]] == Phase.DRAFT
            self._check_weights(rows, ids, weights, drafted)
        empty = (ids == NO_EXPERT).all(axis=1)  # written as such; an unwritten row is all zeros
        filled = empty | (((ids != 0) & (ids != NO_EXPERT)) | (weights != 0)).any(axis=1)
        layers = len(self._layers)
        self._captured |= np.bincount(place[filled & inside], minlength=layers) > 0
        self._rows_of_layer += np.bincount(place[inside], minlength=layers)

    def _check_ids(self, rows: RowGroup, ids: ExpertIds, place: Any) -> None:
        used = ids != NO_EXPERT
        limit = self._num_ids[place]
        outside = used & (ids >= limit[:, None])
        rows.report(
            "id_range",
            outside.any(axis=1),
            lambda i: f"expert id {ids[i][outside[i]][0]}, the layer has 0..{limit[i] - 1}",
            lambda i: int(ids[i][outside[i]][0]),
        )
        ordered = np.sort(ids, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_EXPERT)
        rows.report(
            "duplicates",
            twice.any(axis=1),
            lambda i: f"expert {ordered[i, 1:][twice[i]][0]} occurs twice",
            lambda i: int(ordered[i, 1:][twice[i]][0]),
        )

    def _check_weights(self, rows: RowGroup, ids: ExpertIds, weights: Any, drafted: Bools) -> None:
        """Check weights and their sum; a draft executes a part of what it was routed to."""
        used = ids != NO_EXPERT
        unnamed = ~used.any(axis=1) & (np.nan_to_num(weights) != 0).any(axis=1)
        rows.report(
            "no_expert",
            unnamed,
            lambda i: "all slots are unused, but they have weights",
            lambda i: NO_EXPERT,
        )
        wrong = used & ~(np.isfinite(weights) & (weights >= 0))
        rows.report(
            "weight_finite",
            wrong.any(axis=1),
            lambda i: f"weight {weights[i][wrong[i]][0]} of expert {ids[i][wrong[i]][0]}",
            lambda i: float(weights[i][wrong[i]][0]),
        )
        expected = self._manifest.expected_weight_sum
        if expected is None:
            return
        with np.errstate(invalid="ignore"):  # infinite ones were reported just now, as was NaN
            sums = np.where(used, weights, 0.0).sum(axis=1, dtype=np.float64)
        off = (np.abs(sums - expected) > TOLERANCE * expected) & np.isfinite(sums)
        rows.report(
            "weight_sum",
            off & used.any(axis=1) & ~drafted,
            lambda i: f"weights add up to {sums[i]:.6g}, not {expected:g}",
            lambda i: f"{sums[i]:.6g}",
        )
