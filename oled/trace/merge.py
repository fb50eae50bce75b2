"""`merge`: several traces of one model as one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.manifest import Gap, Kept, Manifest
from oled.trace.parts import PartFolder, new_folder
from oled.trace.rewrite import Copy, copy_forwards
from oled.trace.stream import TraceStream
from oled.trace.tables import PREDICTIONS, SCORES


def merge_traces(
    sources: Sequence[str | Path], destination: str | Path, *, allow_partial: bool = False
) -> Path:
    """Write the traces one after the other; requests and passes are numbered anew.

    All must have the same geometry, kinds of weight and confidence, and side tables. A gap that
    only some declare becomes one that may be filled; what any source lacks, the whole lacks.
    """
    if not sources:
        raise TraceError("nothing to merge: name one trace at least")
    streams = [TraceStream.open(source, allow_partial=allow_partial) for source in sources]
    for stream in streams[1:]:
        _require_same(streams[0], stream)
    with new_folder(destination) as place:
        folder = PartFolder(place, _manifest(streams))
        if not copy_forwards(_copies(streams), folder):
            raise TraceError(f"{streams[0].folder}: no routing row was found")
        folder.complete()
    return Path(destination)


def _require_same(first: TraceStream, other: TraceStream) -> None:
    def facts(stream: TraceStream) -> dict[str, Any]:
        about = stream.manifest
        geometry = replace(about.geometry, name=None).to_json()
        tables = {f"table '{table}'": stream.has(table) for table in (SCORES, PREDICTIONS)}
        return geometry | {
            "weight_kind": about.weight_kind.value,
            "weight_sum": about.weight_sum,
            "confidence_kind": about.confidence_kind.value,
            **tables,
        }

    ours, theirs = facts(first), facts(other)
    for name, value in ours.items():
        if theirs[name] != value:
            hint = "; cut it with `oled slice … drop=…`" if name.startswith("table") else ""
            raise TraceError(
                f"{other.folder} and {first.folder} differ in {name}: "
                f"{_short(theirs[name])} and {_short(value)}{hint}"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _copies(streams: Sequence[TraceStream]) -> list[Copy]:
    copies: list[Copy] = []
    requests = passes = 0
    for stream in streams:
        known, place = np.unique(stream.forwards["request"], return_inverse=True)
        pass_id = stream.forwards["pass_id"].astype(np.int64)
        copies.append(
            Copy(
                stream,
                np.ones(stream.num_forwards, dtype=bool),
                place.astype(np.int64) + requests,
                pass_id + passes,
                stream.manifest.geometry.moe_layers,
            )
        )
        requests += len(known)
        passes += int(pass_id.max()) + 1
    return copies


def _manifest(streams: Sequence[TraceStream]) -> Manifest:
    manifests = [stream.manifest for stream in streams]
    lacks = dict.fromkeys(word for about in manifests for word in about.lacks)
    sources = [
        {
            "name": stream.folder.resolve().name,
            "hash": stream.hash,
            "model": stream.manifest.model,
            "provenance": stream.manifest.provenance,
        }
        for stream in streams
    ]
    return replace(
        manifests[0],
        prompts=_prompts(streams),
        provenance={"kind": "merge", "sources": sources},
        gaps=_gaps(manifests),
        ordered=all(about.ordered for about in manifests),
        lacks=tuple(lacks),
    )


def _prompts(streams: Sequence[TraceStream]) -> tuple[dict[str, Any], ...]:
    """Return the prompt of each request under its new number; empty where a source says nothing."""
    if not any(stream.manifest.prompts for stream in streams):
        return ()
    found: list[dict[str, Any]] = []
    for stream in streams:
        said = stream.manifest.prompts
        for request in np.unique(stream.forwards["request"]):
            found.append(said[request] if request < len(said) else {})
    return tuple(found)


def _gaps(manifests: Sequence[Manifest]) -> tuple[Gap, ...]:
    """Return gaps that all declare alike, and the others as rows that may be there or not."""
    declared: dict[tuple[int, int], list[Gap]] = {}
    for about in manifests:
        for gap in about.gaps:
            declared.setdefault((gap.layer, gap.phase), []).append(gap)
    return tuple(
        gaps[0]
        if len(gaps) == len(manifests) and len({gap.kept for gap in gaps}) == 1
        else replace(gaps[0], kept=Kept.SOME)
        for gaps in declared.values()
    )
