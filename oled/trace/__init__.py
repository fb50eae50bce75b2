"""The trace: what a mixture-of-experts model routed, on disk and in memory.

Write with `TraceWriter`, read with `load`, turn into what the simulator eats with `build_steps`.
"""

from oled.trace.batch import batch
from oled.trace.errors import TraceError
from oled.trace.manifest import Gap, Kept, Manifest, Part, Status, read_manifest
from oled.trace.memory import select_requests, trace_of_records
from oled.trace.migrate import SCHEMA_VERSION
from oled.trace.reader import load
from oled.trace.schema import (
    NO_EXPERT,
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Phase,
    Prediction,
    RouterScores,
    TokenState,
    WeightKind,
)
from oled.trace.steps import (
    CONF_MASKED,
    CONF_OPENED,
    GATE,
    GATE_MASKED,
    NEVER,
    Steps,
    build_steps,
    next_use,
)
from oled.trace.tables import (
    ForwardTable,
    PredictionTable,
    RoutingTable,
    ScoreTable,
    TokenTable,
    Trace,
)
from oled.trace.writer import TraceWriter

__all__ = [
    "CONF_MASKED",
    "CONF_OPENED",
    "GATE",
    "GATE_MASKED",
    "NEVER",
    "NO_EXPERT",
    "SCHEMA_VERSION",
    "ConfidenceKind",
    "ForwardRecord",
    "ForwardTable",
    "Gap",
    "Geometry",
    "Kept",
    "Manifest",
    "Part",
    "Phase",
    "Prediction",
    "PredictionTable",
    "RouterScores",
    "RoutingTable",
    "ScoreTable",
    "Status",
    "Steps",
    "TokenState",
    "TokenTable",
    "Trace",
    "TraceError",
    "TraceWriter",
    "WeightKind",
    "batch",
    "build_steps",
    "load",
    "next_use",
    "read_manifest",
    "select_requests",
    "trace_of_records",
]
