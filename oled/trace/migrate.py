"""Older schema versions, brought up to the present one while they are read.

Version 0, before the first release: `forwards` had neither `pass_id` (every forward is a pass of
its own) nor `produced` (all accepted tokens count), and the manifest said neither `ordered` nor
`lacks`. A new version adds a step to `_MANIFESTS` and, where tables got new columns, to `_COLUMNS`.
Rewriting (`oled slice`, `oled merge`) writes the present version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from oled.trace.errors import TraceError

SCHEMA_VERSION = 1

Fill = Callable[[pa.RecordBatch], pa.Array]


def _manifest_0(data: dict[str, Any]) -> dict[str, Any]:
    return {"ordered": True, "lacks": [], **data}


_MANIFESTS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (_manifest_0,)
"""Step v brings the manifest of version v to version v + 1."""

_COLUMNS: tuple[Mapping[str, Mapping[str, Fill]], ...] = (
    {
        "forwards": {
            "pass_id": lambda rows: rows["forward"],
            "produced": lambda rows: rows["accepted"],
        }
    },
)
"""Step v: by table, the columns that version v + 1 added, and what they are for older rows."""


def migrate_manifest(data: dict[str, Any], version: int, where: str) -> dict[str, Any]:
    """Return the JSON object of a manifest as the present version writes it."""
    if not 0 <= version <= SCHEMA_VERSION:
        raise TraceError(
            f"{where}: schema version {version}, this oled reads 0 to {SCHEMA_VERSION}; use the "
            f"oled that wrote it or record again"
        )
    for step in _MANIFESTS[version:]:
        data = step(data)
    return data


def added_columns(table: str, version: int) -> dict[str, Fill]:
    """Return columns that parts of this version lack, and how to fill them, oldest first."""
    found: dict[str, Fill] = {}
    for step in _COLUMNS[version:]:
        found.update(step.get(table, {}))
    return found
