"""`oled simulate topology=NAME`: several GPUs, on their own clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oled.errors import UserError
from oled.trace import Trace


def simulate(trace: Trace, values: Mapping[str, Any], out: Path) -> str:
    """One simulation: OUT/metrics.json. Caches and the CPU have no part in it."""
    from oled.parallel.api import simulate

    for key in ("timeline", "calibration"):
        if values[key] is not None:
            raise UserError(f"{key} is for policies of one GPU: leave it out with topology=")
    result = simulate(
        trace,
        values["policy"],
        values["topology"],
        hardware=values["hardware"],
        runtime=values["runtime"],
        batch_size=values["workload"]["batch_size"],
        geometry=values["cost"]["geometry"],
    )
    return f"{result.table()}\n{result.write(out)}"
