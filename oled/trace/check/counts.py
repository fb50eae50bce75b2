"""Rows per forward and layer against tokens and declared gaps, with memory for a window."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from oled.trace.check.report import Collector, Finding, RowGroup
from oled.trace.manifest import Kept, Manifest
from oled.trace.reader import offsets_of
from oled.trace.tables import ROUTING
from oled.types import Bools, Ints

WINDOW = 8192
"""Forwards that are counted at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What the forwards and tokens tables promise about the rows."""

    tokens: Ints  # [F]
    phase: Ints  # [F]
    request: Ints  # [F]
    token_offsets: Ints  # [F+1]
    pad: Bools  # [tokens]

    def places(self, rows: RowGroup, layers: Ints) -> tuple[Ints, Bools]:
        """Return dense layers of rows, and whether forward, layer and token are all known."""
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


class RowCounts:
    """Counts rows as they pass by; a forward is judged once the next one has begun.

    That needs rows in order. Where they are not, `give_up` ends the counting: the disorder itself
    has been reported.
    """

    def __init__(self, manifest: Manifest, expected: Expected, found: Collector) -> None:
        layers = len(manifest.geometry.moe_layers)
        self._manifest = manifest
        self._expected = expected
        self._found = found
        self._real = count_between(~expected.pad, expected.token_offsets)  # [F] tokens, no pads
        self._open = 0  # the forward whose rows are still coming
        self._seen = np.zeros(layers, dtype=np.int64)  # of the open forward
        self._last_seen = np.zeros(layers, dtype=bool)  # whether its last token has a row
        self._starts: list[tuple[int, str]] = []  # first forward and name of each part
        self._given_up = False

    def begin(self, file: str, forward: int) -> None:
        """Begin a part with this forward."""
        self._starts.append((forward, file))

    def give_up(self) -> None:
        """Judge nothing from here on."""
        self._given_up = True

    def add(self, forward: Ints, place: Ints, token: Ints) -> None:
        """Count the next rows: known forwards, dense layers and tokens, in ascending order."""
        if self._given_up or not len(forward):
            return
        real = ~self._expected.pad[self._expected.token_offsets[forward] + token]
        is_last = token == self._expected.tokens[forward] - 1
        last = int(forward[-1])
        for begin in range(self._open, last + 1, WINDOW):
            end = min(begin + WINDOW, last + 1)
            rows = slice(*np.searchsorted(forward, [begin, end]))
            self._window(begin, end, (forward[rows], place[rows], real[rows], is_last[rows]))

    def finish(self) -> None:
        """Judge what is left, once all rows have been seen."""
        if self._given_up:
            return
        count = len(self._expected.tokens)
        none = np.empty(0, dtype=np.int64)
        for begin in range(self._open, count, WINDOW):
            self._window(begin, min(begin + WINDOW, count), (none, none, none > 0, none > 0))
        self._judge(self._open, self._seen[None], self._last_seen[None])

    def _window(self, begin: int, end: int, rows: tuple[Ints, Ints, Bools, Bools]) -> None:
        """Count rows of forwards `begin` to `end` - 1, judge all but the last, keep that open."""
        forward, place, real, is_last = rows
        shape = (end - begin, len(self._seen))
        cell = (forward - begin) * shape[1] + place
        seen = np.bincount(cell[real], minlength=shape[0] * shape[1]).reshape(shape)
        last = np.bincount(cell[real & is_last], minlength=shape[0] * shape[1]).reshape(shape) > 0
        if begin == self._open:
            seen[0] += self._seen
            last[0] |= self._last_seen
        else:
            self._judge(begin - 1, self._seen[None], self._last_seen[None])
        self._judge(begin, seen[:-1], last[:-1])
        self._open, self._seen, self._last_seen = end - 1, seen[-1], last[-1]

    def _judge(self, begin: int, seen: Ints, last_seen: Bools) -> None:
        """Judge complete forwards from `begin` on: seen [n, L]."""
        expected, layers = self._expected, self._manifest.geometry.moe_layers
        here = slice(begin, begin + len(seen))
        real = self._real[here]
        least = np.repeat(real[:, None], len(layers), axis=1)
        most = least.copy()
        for gap in self._manifest.gaps:
            place = layers.index(gap.layer)
            hit = expected.phase[here] == gap.phase
            match gap.kept:
                case Kept.NONE:
                    least[hit, place] = most[hit, place] = 0
                case Kept.LAST_TOKEN:
                    least[hit, place] = most[hit, place] = 1
                    # one row, but of another token, is as wrong as none
                    least[hit & ~last_seen[:, place], place] = 2
                case Kept.SOME:
                    least[hit, place] = 0
        wrong = np.argwhere((seen < least) | (seen > most))
        for row, place in wrong[: self._found.limit]:
            count, layer = int(seen[row, place]), int(layers[place])
            message = f"forward {begin + row}: {count} rows for {int(real[row])} tokens"
            if least[row, place] > most[row, place]:
                message += ", none of them the last token's"
            file = self._file_of(int(begin + row))
            self._found.add(Finding("rows_per_layer", file, message, None, layer, str(count)))
        if len(wrong) > self._found.limit:
            self._found.breaches["rows_per_layer"] += len(wrong) - self._found.limit

    def _file_of(self, forward: int) -> str:
        """Return the part that holds a forward, or should."""
        index = bisect.bisect_right([first for first, _ in self._starts], forward) - 1
        return self._starts[max(index, 0)][1] if self._starts else ROUTING


def count_between(flags: Bools, offsets: Ints) -> Ints:
    """Count the flags that are set in each range offsets[i]:offsets[i+1]."""
    return np.diff(offsets_of(flags)[offsets])
