"""The rest of the machine while something is measured: other processes, and stolen time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOST = 0.05
"""Of all CPUs' time, taken by others: above it the machine is busy, and no clock is judged."""

_STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _STEAL, _FIELDS = 3, 4, 7, 8


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since the system began, of all CPUs together."""

    total: float
    busy: float  # any process of this system
    stolen: float  # by other guests of the same host
    own: float  # of this process

    @classmethod
    def now(cls) -> CpuTimes | None:
        """Return the present times; None where the system does not tell them."""
        if not _STAT.is_file():
            return None
        fields = _STAT.read_text().splitlines()[0].split()[1 : 1 + _FIELDS]
        ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
        stolen = ticks[_STEAL] if len(ticks) > _STEAL else 0.0
        idle = ticks[_IDLE] + ticks[_IOWAIT]
        return cls(sum(ticks), sum(ticks) - idle - stolen, stolen, time.process_time())

    def since(self, earlier: CpuTimes) -> dict[str, float]:
        """Return the shares of all CPUs' time that `others` and `stolen` took since `earlier`."""
        total = max(self.total - earlier.total, 1e-9)
        own = self.own - earlier.own
        others = max(0.0, self.busy - earlier.busy - own)
        return {"others": others / total, "stolen": (self.stolen - earlier.stolen) / total}


def is_loaded(shares: Mapping[str, float]) -> bool:
    """Return whether others took more than `MOST` of the machine."""
    return sum(shares.values()) > MOST
