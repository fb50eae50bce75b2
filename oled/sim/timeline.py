"""A window of the run as Chrome trace events (JSON), which Perfetto opens."""

from __future__ import annotations

import bisect
import dataclasses
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.atomic import write_bytes
from oled.sim import lanes as ln

LANES = ("GPU compute", "H2D link", "CPU workers", "D2H link", "policy")
"""Lane names, the same for simulated and live runs."""

_SLICES = {
    ln.LOG_HEAD: (0, "head"),
    ln.LOG_DENSE: (0, "dense"),
    ln.LOG_HITS: (0, "hits"),
    ln.LOG_LANDED: (0, "landed"),
    ln.LOG_COPY: (1, "copy"),
    ln.LOG_PREFETCH: (1, "prefetch"),
    ln.LOG_CPU: (2, "cpu experts"),
    ln.LOG_OUT: (3, "activations out"),
    ln.LOG_BACK: (3, "copy back"),
    ln.LOG_POLICY: (4, "policy"),
}
_EXPERT_ITEM = (ln.LOG_COPY, ln.LOG_PREFETCH, ln.LOG_BACK)
_COUNTERS = {ln.LOG_RESIDENTS: "resident experts", ln.LOG_QUEUE: "link queue"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Entries i64[n, 6]: kind, begin_ns, end_ns, forward, layer (0..L-1, -1 none), item."""

    name: str
    layers: tuple[int, ...]  # absolute id of each MoE layer
    entries: NDArray[np.int64]
    side: str = "simulated"  # or "live"

    @classmethod
    def of(cls, lanes: ln.Lanes, layers: Sequence[int], name: str) -> Timeline:
        return cls(name, tuple(layers), lanes.log[: lanes.entries].copy())

    def events(self, process: int = 1) -> list[dict[str, Any]]:
        """Chrome trace events; times in microseconds. `process` sets runs side by side."""
        return [*self._names(process), *self._slices(process), *self._flows(process)]

    def write(self, path: str | Path) -> Path:
        """Write a `.json.gz` (or `.json`) that ui.perfetto.dev opens; same input, same bytes."""
        return write_events(path, self.events())

    def _names(self, process: int) -> Iterator[dict[str, Any]]:
        yield _meta(process, 0, "process_name", {"name": f"{self.side}: {self.name}"})
        for thread, lane in enumerate(LANES):
            yield _meta(process, thread, "thread_name", {"name": lane})
            yield _meta(process, thread, "thread_sort_index", {"sort_index": thread})

    def _label(self, layer: int) -> str:
        return "" if layer < 0 else f" L{self.layers[layer]}"

    def _slices(self, process: int) -> Iterator[dict[str, Any]]:
        for kind, begin, end, forward, layer, item in self.entries.tolist():
            if kind == ln.LOG_USE:  # an end of an arrow
                continue
            if kind in _COUNTERS:
                where = self._label(layer) if kind == ln.LOG_RESIDENTS else ""
                yield {
                    "ph": "C",
                    "pid": process,
                    "name": f"{_COUNTERS[kind]}{where}",
                    "ts": begin / 1e3,
                    "args": {"value": item},
                }
                continue
            thread, word = _SLICES[kind]
            what = f" E{item}" if kind in _EXPERT_ITEM else ""
            yield {
                "ph": "X",
                "pid": process,
                "tid": thread,
                "name": f"{word}{self._label(layer)}{what}",
                "cat": word,
                "ts": begin / 1e3,
                "dur": (end - begin) / 1e3,
                "args": {"forward": forward, "expert" if what else "count": item},
            }

    def _flows(self, process: int) -> Iterator[dict[str, Any]]:
        """An arrow from each prefetch that was used to the launch group that used it."""
        groups: dict[int, list[int]] = {}
        for kind, begin, _, _, layer, _ in self.entries.tolist():
            if kind in (ln.LOG_HITS, ln.LOG_LANDED):
                groups.setdefault(layer, []).append(begin)
        arrived: dict[tuple[int, int], int] = {}
        for number, (kind, _, end, _, layer, item) in enumerate(self.entries.tolist()):
            if kind == ln.LOG_PREFETCH:
                arrived[layer, item] = end
            elif kind == ln.LOG_USE and (layer, item) in arrived:
                landed, launches = arrived.pop((layer, item)), groups.get(layer, [])
                launch = bisect.bisect_left(launches, end)
                if launch == len(launches):
                    continue
                flow = {"pid": process, "cat": "prefetch", "name": f"prefetch E{item}"}
                flow["id"] = number
                yield {**flow, "ph": "s", "tid": 1, "ts": landed / 1e3}
                yield {**flow, "ph": "f", "bp": "e", "tid": 0, "ts": launches[launch] / 1e3}


def write_events(path: str | Path, events: list[dict[str, Any]]) -> Path:
    """Write the events of one or more timelines as one file, all of it or nothing."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    data = text.encode()
    if file.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    return write_bytes(file, data)


def _meta(process: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": args}
