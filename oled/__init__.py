"""Which experts of a mixture-of-experts model should stay on the GPU: record, replay, compare.

`oled.load`, `oled.simulate` and `oled.sweep` are what a notebook needs; the command line is a thin
shell over them. They are imported on first use, so that `import oled` stays light.

Letters used everywhere: L MoE layers, E routed experts of a layer, k top-k, T tokens of a forward,
C resident slots of a layer, S bytes of an expert, A the active set of a layer-step.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oled.sim.api import simulate
    from oled.sim.result import Result
    from oled.sim.settings import Settings
    from oled.sweeps import Workers, sweep
    from oled.trace.reader import load
    from oled.trace.synthetic import Synthetic
    from oled.trace.tables import Trace

__version__ = "0.1.0"
__all__ = [
    "Result",
    "Settings",
    "Synthetic",
    "Trace",
    "Workers",
    "__version__",
    "load",
    "simulate",
    "sweep",
]

_HOME = {
    "Result": "oled.sim.result",
    "Settings": "oled.sim.settings",
    "simulate": "oled.sim.api",
    "Trace": "oled.trace.tables",
    "load": "oled.trace.reader",
    "Synthetic": "oled.trace.synthetic",
    "sweep": "oled.sweeps",
    "Workers": "oled.sweeps",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'oled' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
