"""`slice`: some requests, layers or forwards of a trace, as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.manifest import Manifest
from oled.trace.parts import PartFolder, new_folder
from oled.trace.ranges import Ranges
from oled.trace.rewrite import Copy, copy_forwards
from oled.trace.schema import Geometry
from oled.trace.stream import TraceStream
from oled.trace.tables import PREDICTIONS, SCORES
from oled.types import Bools


def slice_trace(
    source: str | Path,
    destination: str | Path,
    *,
    requests: Ranges | Sequence[int] | None = None,
    layers: Ranges | Sequence[int] | None = None,
    forwards: Ranges | Sequence[int] | None = None,
    drop: Sequence[str] = (),
    allow_partial: bool = False,
) -> Path:
    """Write what is in all the given sets; forwards are numbered anew, requests keep their ids.

    `drop` leaves out side tables (scores, predictions). Memory is bounded by forwards and tokens.
    """
    unknown = set(drop) - {SCORES, PREDICTIONS}
    if unknown:
        raise TraceError(f"drop={min(unknown)}: only {SCORES} and {PREDICTIONS} can be left out")
    stream = TraceStream.open(source, allow_partial=allow_partial)
    asked = {
        name: value if isinstance(value, Ranges) else Ranges.of(value)
        for name, value in (("requests", requests), ("layers", layers), ("forwards", forwards))
        if value is not None
    }
    kept = np.ones(stream.num_forwards, dtype=bool)
    if "requests" in asked:
        kept &= asked["requests"].among(stream.forwards["request"], "request")
    if "forwards" in asked:
        kept &= asked["forwards"].among(stream.forwards["forward"], "forward")
    if not kept.any():
        raise TraceError(f"{stream.folder}: no forward is of these requests and these forwards")
    manifest = _manifest(stream, asked, drop)
    side = tuple(table for table in (SCORES, PREDICTIONS) if table not in drop)
    ids = {name: stream.forwards[name].astype(np.int64) for name in ("request", "pass_id")}
    copy = Copy(stream, kept, **ids, layers=manifest.geometry.moe_layers, side_tables=side)
    with new_folder(destination) as place:
        folder = PartFolder(place, manifest)
        if not copy_forwards([copy], folder):
            raise TraceError(f"{stream.folder}: no routing row is left")
        folder.complete()
    return Path(destination)


def _manifest(stream: TraceStream, asked: dict[str, Ranges], drop: Sequence[str]) -> Manifest:
    about = stream.manifest
    geometry = about.geometry
    if "layers" in asked:
        known = np.array(geometry.moe_layers)
        geometry = _some_layers(geometry, asked["layers"].among(known, "MoE layer"))
    provenance = {
        "kind": "slice",
        "of": stream.folder.resolve().name,
        "hash": stream.hash,
        **{name: str(ranges) for name, ranges in asked.items()},
        "drop": list(drop),
        "source": about.provenance,
    }
    gaps = tuple(gap for gap in about.gaps if gap.layer in geometry.moe_layers)
    return replace(about, geometry=geometry, gaps=gaps, provenance=provenance)


def _some_layers(geometry: Geometry, chosen: Bools) -> Geometry:
    """Return the geometry with fewer MoE layers (the others count as dense)."""
    together = chosen.reshape(-1, geometry.expert_parts)
    if (together.any(axis=1) != together.all(axis=1)).any():
        raise TraceError(
            f"layers: every {geometry.expert_parts} of {list(geometry.moe_layers)} hold the parts "
            "of one layer's experts; take all of them or none"
        )

    def cut(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(value for value, keep in zip(values, chosen, strict=True) if keep)

    return replace(
        geometry,
        moe_layers=cut(geometry.moe_layers),
        experts_per_layer=cut(geometry.experts_per_layer),
        expert_bytes=cut(geometry.expert_bytes),
    )
