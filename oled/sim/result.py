"""What a simulation gave, and how it is written down."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.atomic import write_text
from oled.sim.prepare import Replay
from oled.sim.timeline import Timeline


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What one simulation gave."""

    metrics: dict[str, Any]  # flat and stable names, see DESIGN; `phases` and `provenance` nested
    per_layer: dict[str, NDArray[np.int64]]  # accesses, hits, transfers, cpu_executions, ... [L]
    per_request: dict[str, NDArray[np.int64]]  # prefill_ns, decoding_ns [R]
    forward_ns: NDArray[np.int64]  # [F] in replay order
    timeline: Timeline | None
    replay: Replay

    def write(self, out: str | Path) -> Path:
        """Write OUT/metrics.json (atomically); returns its path."""
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "metrics.json"
        text = json.dumps(self.metrics, indent=1, allow_nan=False) + "\n"
        return write_text(file, text)

    def table(self) -> str:
        """The figures that people ask for first, one a line."""
        return table(self.metrics)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3f} ms"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def table(metrics: dict[str, Any]) -> str:
    """The figures that people ask for first, one a line."""
    origin = metrics["provenance"]
    lines = [
        ("policy", origin["policy"]),
        ("trace", origin["trace"]),
        ("machine", f"{origin['hardware']}, runtime {origin['runtime']}"),
        ("TPOT", _ms(metrics["tpot_ns"])),
        ("TTFT", _ms(metrics["ttft_ns"])),
        (
            "forward p50 / p95",
            f"{_ms(metrics['forward_ns_p50'])} / {_ms(metrics['forward_ns_p95'])}",
        ),
        ("hit rate", _share(metrics["hit_rate"])),
        ("attainable hit rate", _share(metrics["hit_rate_attainable"])),
        ("transfers, on the CPU", f"{metrics['transfers']:,}, {metrics['cpu_executions']:,}"),
        ("copied to the GPU", f"{metrics['h2d_bytes'] / 2**30:.3f} GiB"),
        ("GPU memory of experts", f"{metrics['gpu_bytes_total'] / 2**30:.3f} GiB"),
    ]
    references = (
        ("ideal (all hits)", "ideal_tpot_ns"),
        ("all resident, no runtime", "all_resident_tpot_ns"),
        ("lower bound", "bound_relaxed_tpot_ns"),
        ("Belady, uniform slots", "ref_belady_uniform_tpot_ns"),
        ("Belady, pooled slots", "ref_belady_pooled_tpot_ns"),
        ("no cache", "no_cache_tpot_ns"),
    )
    lines += [(f"TPOT {name}", _ms(metrics[key])) for name, key in references if key in metrics]
    lines += [("note", label) for label in origin["labels"]]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
