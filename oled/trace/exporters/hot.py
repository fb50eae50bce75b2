"""The most used experts of each layer, as JSON: what a static placement wants to know.

`top=N` keeps the first N. Experts are ordered by the number of tokens routed to them, then by id;
beside it stand the forwards they were active in and, where there are weights, their summed weight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.longform import active_windows, distinct
from oled.trace.options import Options
from oled.trace.stream import TraceStream


def to_hot_experts(stream: TraceStream, path: Path, options: Options) -> None:
    """Return count, then write one object a layer."""
    top = options.integer("top")
    counts = _count(stream)
    about = stream.manifest
    data: dict[str, Any] = {
        "format": "oled_hot_experts",
        "model": about.model,
        "trace_hash": stream.hash,
        "forwards": stream.num_forwards,
        "layers": {
            str(layer): _layer(counts[place, :, :experts], top, about.has_weights)
            for place, (layer, experts) in enumerate(
                zip(about.geometry.moe_layers, about.geometry.experts_per_layer, strict=True)
            )
        },
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _layer(counts: Any, top: int | None, weights: bool) -> list[dict[str, Any]]:
    tokens, forwards, weight = counts
    order = np.lexsort((np.arange(len(tokens)), -tokens))
    return [
        {
            "expert": int(expert),
            "tokens": int(tokens[expert]),
            "forwards": int(forwards[expert]),
            **({"weight": round(float(weight[expert]), 6)} if weights else {}),
        }
        for expert in order[:top]
    ]


def _count(stream: TraceStream) -> Any:
    """Count tokens, forwards and weight of each expert: f64[L, 3, E]; pads do not count."""
    geometry = stream.manifest.geometry
    layers, widest = len(geometry.moe_layers), max(geometry.experts_per_layer)
    size = layers * widest
    total = np.zeros((layers, 3, widest))
    for columns, place in active_windows(stream):
        cell = place * widest + columns["expert"]
        once = distinct(columns["forward"] * size + cell) % size
        total[:, 0] += np.bincount(cell, minlength=size).reshape(-1, widest)
        total[:, 1] += np.bincount(once, minlength=size).reshape(-1, widest)
        weight = np.bincount(cell, weights=columns["weight"], minlength=size)
        total[:, 2] += weight.reshape(-1, widest)
    return total
