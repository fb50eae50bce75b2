"""The rules about routing rows, in one streamed pass with memory for forwards, not for rows."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.trace.check.report import Collector, Finding, RowGroup
from oled.trace.manifest import Kept, Manifest, Part
from oled.trace.reader import Columns, row_groups
from oled.trace.schema import NO_EXPERT
from oled.trace.tables import ROUTING

TOLERANCE = 4e-3
"""Relative, for sums of weights: bf16 weights gave sums from 0.9975 to 1.0024."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What the forwards and tokens tables promise about the rows."""

    tokens: NDArray[np.int64]  # [F]
    phase: NDArray[np.int64]  # [F]
    token_offsets: NDArray[np.int64]  # [F+1]
    pad: Bools  # [N]

    def places(self, rows: RowGroup, layers: NDArray[np.int64]) -> tuple[NDArray[np.int64], Bools]:
        """Dense layers of rows, and whether forward, layer and token are all known."""
        place = np.minimum(np.searchsorted(layers, rows.layer), len(layers) - 1)
        known = layers[place] == rows.layer
        inside = rows.forward < len(self.tokens)
        if rows.token is not None:
            inside &= rows.token < self.tokens[np.minimum(rows.forward, len(self.tokens) - 1)]
        rows.report("values", ~known, lambda i: "this is no MoE layer", lambda i: rows.layer[i])
        rows.report(
            "numbering",
            ~inside,
            lambda i: "the other tables have no such forward or token",
            lambda i: rows.forward[i],
        )
        return place.astype(np.int64), known & inside


class RoutingCheck:
    """State of the pass: rows seen per forward and layer, and the last row's place."""

    def __init__(self, folder: Path, manifest: Manifest, expected: Expected, found: Collector):
        geometry = manifest.geometry
        layers = len(geometry.moe_layers)
        self._folder = folder
        self._manifest = manifest
        self._expected = expected
        self._found = found
        self._layers = np.array(geometry.moe_layers, dtype=np.int64)
        self._num_ids = np.array(geometry.experts_per_layer, dtype=np.int64) + geometry.zero_experts
        self._seen = np.zeros((len(expected.tokens), layers), dtype=np.int32)  # without pads
        self._last_seen = np.zeros((len(expected.tokens), layers), dtype=bool)
        self._captured = np.zeros(layers, dtype=bool)
        self._starts: list[tuple[int, str]] = []  # first forward and name of each part
        self._previous = -1  # sort key of the last row
        self.rows = 0

    def run(self, parts: list[Part]) -> None:
        """Stream the parts, then judge what only the whole can show."""
        for part in parts:
            for columns, start in row_groups(self._folder, part):
                if start == 0:
                    self._starts.append((int(columns["forward"][0]), part.file))
                self._group(part.file, start, columns)
        self._judge_counts()
        for place in np.flatnonzero(~self._captured & (self._seen.sum(axis=0) > 0)):
            layer = int(self._layers[place])
            message = f"all {self._seen[:, place].sum()} rows have ids and weights of zero"
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
        self._count(forward, place, token, inside)
        self._check_ids(rows, ids, place)
        if self._manifest.has_weights:
            self._check_weights(rows, ids, weights)
        filled = (((ids != 0) & (ids != NO_EXPERT)) | (weights != 0)).any(axis=1)
        self._captured |= np.bincount(place[filled & inside], minlength=len(self._layers)) > 0

    def _count(self, forward: Any, place: Any, token: Any, valid: Bools) -> None:
        forward, place, token = forward[valid], place[valid], token[valid]
        real = ~self._expected.pad[self._expected.token_offsets[forward] + token]
        forward, place, token = forward[real], place[real], token[real]
        np.add.at(self._seen, (forward, place), 1)
        last = token == self._expected.tokens[forward] - 1
        self._last_seen[forward[last], place[last]] = True

    def _check_ids(self, rows: RowGroup, ids: NDArray[np.uint16], place: Any) -> None:
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
        rows.report(
            "no_expert", ~used.any(axis=1), lambda i: "all slots are unused", lambda i: NO_EXPERT
        )

    def _check_weights(self, rows: RowGroup, ids: NDArray[np.uint16], weights: Any) -> None:
        used = ids != NO_EXPERT
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
        sums = np.where(used, weights, 0.0).sum(axis=1, dtype=np.float64)
        # rows with NaN were reported just now: they compare false here
        off = (np.abs(sums - expected) > TOLERANCE * expected) & np.isfinite(sums)
        rows.report(
            "weight_sum",
            off & used.any(axis=1),
            lambda i: f"weights add up to {sums[i]:.6g}, not {expected:g}",
            lambda i: f"{sums[i]:.6g}",
        )

    def _judge_counts(self) -> None:
        """Rows per layer, against tokens without pads and the declared gaps."""
        expected = self._expected
        real = count_between(~expected.pad, expected.token_offsets)
        least = np.repeat(real[:, None], len(self._layers), axis=1)
        most = least.copy()
        for gap in self._manifest.gaps:
            place = self._manifest.geometry.moe_layers.index(gap.layer)
            hit = expected.phase == gap.phase
            match gap.kept:
                case Kept.NONE:
                    least[hit, place] = most[hit, place] = 0
                case Kept.LAST_TOKEN:
                    least[hit, place] = most[hit, place] = 1
                    # one row, but of another token, is as wrong as none
                    least[hit & ~self._last_seen[:, place], place] = 2
                case Kept.SOME:
                    least[hit, place] = 0
        wrong = np.argwhere((self._seen < least) | (self._seen > most))
        for forward, place in wrong[: self._found.limit]:
            seen, layer = int(self._seen[forward, place]), int(self._layers[place])
            message = f"forward {forward}: {seen} rows for {int(real[forward])} tokens"
            if least[forward, place] > most[forward, place]:
                message += ", none of them the last token's"
            file = self._file_of(int(forward))
            self._found.add(Finding("rows_per_layer", file, message, None, layer, str(seen)))
        if len(wrong) > self._found.limit:
            self._found.breaches["rows_per_layer"] += len(wrong) - self._found.limit

    def _file_of(self, forward: int) -> str:
        """The part that holds a forward, or should."""
        index = bisect.bisect_right([first for first, _ in self._starts], forward) - 1
        return self._starts[max(index, 0)][1] if self._starts else ROUTING


def count_between(flags: Bools, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many flags are set in each range offsets[i]:offsets[i+1]."""
    total = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return np.diff(total[offsets])
