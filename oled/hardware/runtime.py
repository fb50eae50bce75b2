"""Runtime presets: what the software adds on the GPU's critical path.

Kernels alone cannot explain published forward times (`reference/hardware.md` section 6.1), so
every result names the preset that it was computed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from oled.hardware.files import check_keys, parse_quantity, read_named, shipped
from oled.hardware.quantity import Bound, Dimension, Quantity

_GROUP = "runtime"
_TIMES = ("per_layer", "per_active_expert", "policy_per_layer")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Times that come on top of the kernels' own."""

    name: str
    description: str
    per_layer: Quantity  # added to every MoE layer
    per_active_expert: Quantity  # launches of an expert; the larger of these and the kernel counts
    policy_per_layer: Quantity  # deciding, per MoE layer, on the critical path

    @property
    def per_layer_ns(self) -> int:
        return round(self.per_layer.base)

    @property
    def per_active_expert_ns(self) -> int:
        return round(self.per_active_expert.base)

    @property
    def policy_ns_per_layer(self) -> int:
        return round(self.policy_per_layer.base)

    def at(self, bound: Bound) -> Self:
        """The preset with each time at its low, high, fast or slow end."""
        return replace(
            self,
            name=self.name if bound == "value" else f"{self.name}@{bound}",
            per_layer=self.per_layer.at(bound),
            per_active_expert=self.per_active_expert.at(bound),
            policy_per_layer=self.policy_per_layer.at(bound),
        )

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str) -> Self:
        """Read a preset; `where` (a file, or 'runtime') begins every message."""
        check_keys(data, ("name", "description", *_TIMES), optional=("sources",), where=where)
        times = {
            name: parse_quantity(data[name], f"{where}: {name}", Dimension.TIME) for name in _TIMES
        }
        return cls(name=str(data["name"]), description=str(data["description"]), **times)


def load_runtime(source: str | Path | Mapping[str, Any]) -> Runtime:
    """A shipped preset by name, a YAML file by path, or a mapping in the file's form."""
    if isinstance(source, Mapping):
        return Runtime.from_mapping(source, _GROUP)
    data, where = read_named(_GROUP, source)
    return Runtime.from_mapping(data, where)


def list_runtimes() -> list[tuple[str, str]]:
    """(name, one-line description) of the shipped presets."""
    return [(name, load_runtime(name).description) for name in shipped(_GROUP)]
