"""Made-up traces, for tests and benchmarks: no measurement, and no claim about any model."""

from oled.trace.synthetic.decode import Decoding
from oled.trace.synthetic.generate import (
    llada2_mini,
    synthetic,
    synthetic_manifest,
    synthetic_steps,
    synthetic_trace,
    write_synthetic,
)
from oled.trace.synthetic.named import Synthetic
from oled.trace.synthetic.process import LAYERED, WIDE, Process
from oled.trace.synthetic.requests import Workload

__all__ = [
    "LAYERED",
    "WIDE",
    "Decoding",
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
