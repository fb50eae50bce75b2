"""Which machine this is, for reports and profiles."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ASKED = {
    "driver": "driver_version",
    "link_generation": "pcie.link.gen.current",
    "link_width": "pcie.link.width.current",
    "power_limit": "power.limit",
    "clock_limit": "clocks.max.sm",
}
"""What `nvidia-smi` is asked: by our names."""


def machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "numba")},
        "load_average": round(os.getloadavg()[0], 1),
        "scheduling": scheduling(),
    }


def scheduling() -> str:
    """How Linux treats this process beside others."""
    if not hasattr(os, "sched_getscheduler"):
        return "unknown"
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        return f"real time, priority {os.sched_getparam(0).sched_priority}"
    return f"shared, nice {os.getpriority(os.PRIO_PROCESS, 0)}"


def gpu_facts(index: int = 0) -> dict[str, Any]:
    """Driver, link and limits of a GPU; nothing where `nvidia-smi` does not tell.

    The link's generation is the present one: ask while copies run, it falls when the GPU is idle.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = f"--query-gpu={','.join(_ASKED.values())}"
    words = [tool, query, "--format=csv,noheader", f"--id={index}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(values) != len(_ASKED):
        return {}
    return {name: value for name, value in zip(_ASKED, values, strict=True) if "N/A" not in value}


def processor() -> str:
    """The name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
