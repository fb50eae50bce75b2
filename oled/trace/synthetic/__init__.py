"""Made-up traces, for tests and benchmarks: no measurement, and no claim about any model."""

from oled.trace.synthetic.generate import (
    Workload,
    llada2_mini,
    synthetic,
    synthetic_manifest,
    synthetic_steps,
    synthetic_trace,
    write_synthetic,
)
from oled.trace.synthetic.named import Synthetic
from oled.trace.synthetic.process import LAYERED, WIDE, Process

__all__ = [
    "LAYERED",
    "WIDE",
    "Process",
    "Synthetic",
    "Workload",
    "llada2_mini",
    "synthetic",
    "synthetic_manifest",
    "synthetic_steps",
    "synthetic_trace",
    "write_synthetic",
]
