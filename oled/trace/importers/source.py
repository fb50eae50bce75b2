"""What a reader of another format hands over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oled.trace.manifest import Manifest
from oled.trace.schema import ForwardRecord


@dataclass(frozen=True, slots=True)
class Source:
    """A manifest and the forwards, which may be read once."""

    manifest: Manifest
    records: Iterable[ForwardRecord]


def provenance(name: str, path: Path) -> dict[str, Any]:
    """Which file a trace was imported from."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"kind": "import", "format": name, "file": path.name, "sha256": digest}
