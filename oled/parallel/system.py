"""A named system of several GPUs: a placement and how its tokens travel. A YAML in
`conf/policy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from oled.errors import UserError, nearest
from oled.parallel.placement import Placement
from oled.parallel.transport import Transport
from oled.policies.files import PLACEMENT, make_part, placement_names, read_policy

_KEYS = ("name", "description", "source", PLACEMENT, "transport", "chunks")


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """A placement and a transport; `chunks`: how finely computation and transport overlap."""

    name: str
    description: str
    source: str
    placement: Placement
    transport: Transport = Transport.DIRECT
    chunks: int = 1  # 1: one after the other

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str) -> Self:
        """Read a system; `where` (a file, or 'policy') begins every message."""
        for key in data:
            if key not in _KEYS:
                raise UserError(f"{where}: unknown key '{key}': {nearest(str(key), _KEYS)}")
        for key in ("name", "description", PLACEMENT):
            if key not in data:
                raise UserError(f"{where}: '{key}' is missing")
        transport, chunks = data.get("transport", "direct"), data.get("chunks", 1)
        if transport not in set(Transport):
            raise UserError(f"{where}: transport is '{transport}': {nearest(transport, Transport)}")
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise UserError(f"{where}: chunks is {chunks!r}; it must be a number of at least 1")
        return cls(
            str(data["name"]),
            str(data["description"]),
            str(data.get("source", "")),
            make_part(data[PLACEMENT], Placement, f"{where}: {PLACEMENT}"),
            Transport(transport),
            chunks,
        )


def load_system(policy: str | Path | Mapping[str, Any] | System) -> System:
    """Load a system by its name in `conf/policy`, by a YAML file's path, or from a mapping."""
    if isinstance(policy, System):
        return policy
    data, where = read_policy(policy)
    if PLACEMENT not in data:
        raise UserError(
            f"policy '{data.get('name', where)}' runs on one GPU; it has no topology: leave it out"
        )
    return System.from_mapping(data, where)


def list_systems() -> list[tuple[str, str]]:
    """Return (name, one-line description) of the shipped systems."""
    return [(name, load_system(name).description) for name in placement_names()]
