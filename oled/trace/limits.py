"""What is refused because of its size, before memory or time is spent on it."""

from __future__ import annotations

import resource
from pathlib import Path

from oled.trace.errors import TraceError

MAX_PARTS = 30_000
"""Parts of one trace. Each costs a file to open; more of them want merging into larger ones."""
MAX_MANIFEST_BYTES = 64 << 20
MAX_LAYERS = 65536
"""Layer ids are stored in 16 bits."""
MAX_EXPERT_BYTES = 1 << 48


def available_bytes() -> int | None:
    """Return the memory that this process may still take, None where the system does not say."""
    found = []
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    group, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if group and used and group[0].isdigit():
        found.append(int(group[0]) - int(used[0]))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _lines("/proc/self/statm")
    if soft != resource.RLIM_INFINITY and pages:
        found.append(soft - int(pages[0].split()[0]) * resource.getpagesize())
    return min(found, default=None)


def require_memory(wanted: int, what: str) -> None:
    """Refuse what would not fit, with both numbers."""
    free = available_bytes()
    if free is not None and wanted > free:
        raise TraceError(
            f"{what} takes {gib(wanted)} in memory, {gib(max(free, 0))} are free; cut it with "
            f"`oled slice` (requests, layers or forwards) or use a larger machine"
        )


def gib(size: int) -> str:
    """Format bytes for people."""
    return f"{size / 2**30:.3g} GiB"


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
