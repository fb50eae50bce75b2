"""The result of a simulation: its metrics, how they are written and how they are printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.atomic import write_text
from oled.hardware.labels import advice
from oled.sim.prepare import Replay
from oled.sim.timeline import Timeline


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The metrics of one simulation, on one GPU or on several."""

    metrics: dict[str, Any]  # flat and stable names, see DESIGN; `phases` and `provenance` nested

    def write(self, out: str | Path) -> Path:
        """Write OUT/metrics.json (atomically); return its path."""
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "metrics.json"
        text = json.dumps(self.metrics, indent=1, allow_nan=False) + "\n"
        return write_text(file, text)

    def table(self) -> str:
        """Return the figures that people ask for first, one a line."""
        origin, found = self.metrics["provenance"], self.metrics
        rows = origin["settings"]["batch_size"]
        gpus = f"{found['ranks']} x " if "topology" in origin else ""
        links = f" on {origin['topology']}" if "topology" in origin else ""
        lines = [
            ("policy", origin["policy"]),
            ("trace", origin["trace"] + (f", {rows} requests in lockstep" if rows > 1 else "")),
            ("machine", f"{gpus}{origin['hardware']}{links}, runtime {origin['runtime']}"),
        ]
        for heading, *cells in _LINES:
            if all(key in found for key, _ in cells):
                between = " / " if "/" in heading else ", "
                lines.append((heading, between.join(show(found[key]) for key, show in cells)))
        lines += [("note", label) for label in origin["labels"]]
        lines += [("advice", text) for text in advice(origin["labels"])]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Result(Outcome):
    """The result of one simulation on one GPU."""

    per_layer: dict[str, NDArray[np.int64]]  # accesses, hits, transfers, cpu_executions, ... [L]
    per_request: dict[str, NDArray[np.int64]]  # prefill_ns, decoding_ns [R]
    forward_ns: NDArray[np.int64]  # [F] in replay order
    timeline: Timeline | None
    replay: Replay


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3f} ms"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _gib(value: float) -> str:
    return f"{value / 2**30:.3f} GiB"


_count, _ratio = "{:,}".format, "{:.3f}".format
Cell = tuple[str, Callable[[Any], str]]
"""A metric and how it is shown."""
_LINES: tuple[tuple[str, *tuple[Cell, ...]], ...] = (
    ("TPOT", ("tpot_ns", _ms)),
    ("prefill", ("prefill_ns", _ms)),
    ("first tokens", ("ttft_ns", _ms)),
    ("forward p50 / p95", ("forward_ns_p50", _ms), ("forward_ns_p95", _ms)),
    ("hit rate", ("hit_rate", _share)),
    ("hit rate with prefill", ("hit_rate_all", _share)),
    ("attainable hit rate", ("hit_rate_attainable", _share)),
    ("transfers, on the CPU", ("transfers", _count), ("cpu_executions", _count)),
    ("copied to the GPU", ("h2d_bytes", _gib)),
    ("imbalance: time, tokens", ("imbalance", _ratio), ("imbalance_tokens", _ratio)),
    ("experts, busiest rank", ("compute_ns", _ms)),
    ("all-to-all, not hidden", ("transport_ns", _ms), ("transport_ns_exposed", _ms)),
    ("experts moved, time", ("migrations", _count), ("migration_ns", _ms)),
    ("standby copies in use", ("activations", _count)),
    ("GPU memory of experts", ("gpu_bytes_total", _gib)),
    ("of it on each GPU", ("gpu_bytes_rank", _gib)),
    ("TPOT ideal (all hits)", ("ideal_tpot_ns", _ms)),
    ("TPOT balanced (bound)", ("balanced_tpot_ns", _ms)),
    ("TPOT all resident, no runtime", ("all_resident_tpot_ns", _ms)),
    ("TPOT lower bound", ("bound_relaxed_tpot_ns", _ms)),
    ("TPOT Belady of demand, uniform", ("ref_belady_uniform_tpot_ns", _ms)),
    ("TPOT Belady of demand, pooled", ("ref_belady_pooled_tpot_ns", _ms)),
    ("TPOT no cache", ("no_cache_tpot_ns", _ms)),
)
"""A line is shown where the simulation has all of its metrics."""
