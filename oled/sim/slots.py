"""`cache.slots`: what a user may write, and the slots and bytes that it means."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_BYTES = re.compile(rf"({_DECIMAL})\s*({'|'.join(_UNITS)})")


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Room for resident experts: slots of each layer i64[L], and bytes of the whole model."""

    capacity: NDArray[np.int64]
    total_bytes: int


def parse_bytes(text: str) -> int:
    """'8GiB' -> 8589934592. Raises UserError for anything else."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise UserError(f"'{text}' is no amount of memory: write it as 8GiB, 500MiB or 2GB")
    return round(float(match[1]) * _UNITS[match[2]])


def parse_slots(
    slots: int | float | str,
    scope: str,
    num_experts: NDArray[np.int64],
    expert_bytes: NDArray[np.int64],
) -> Budget:
    """The room that `slots` gives.

    An integer is slots of a layer (scope `global`: of the model), a number with a point a fraction
    of all experts' bytes; text with a unit bytes for the model, shared evenly in scope `layer`.
    num_experts, expert_bytes i64[L].
    """
    if scope not in ("layer", "global"):
        raise UserError(f"cache.scope is '{scope}'; it is 'layer' or 'global'")
    if isinstance(slots, str) and re.fullmatch(r"[0-9]+", slots.strip()):
        slots = int(slots)
    elif isinstance(slots, str) and re.fullmatch(_DECIMAL, slots.strip()):
        slots = float(slots)
    everything = int((num_experts * expert_bytes).sum())
    if isinstance(slots, np.generic):
        slots = slots.item()
    if isinstance(slots, bool) or not isinstance(slots, int | float | str):
        raise UserError(f"cache.slots is {slots!r}; write 40, 0.25 or 8GiB")
    if isinstance(slots, int):
        return _whole_slots(slots, scope, num_experts, expert_bytes)
    if isinstance(slots, float):
        if not 0.0 <= slots <= 1.0:
            raise UserError(f"cache.slots is the fraction {slots}; it must lie between 0.0 and 1.0")
        capacity = np.floor(slots * num_experts + 1e-9).astype(np.int64)
        return Budget(capacity, int(slots * everything + 0.01))  # 0.29 of 100 experts are 29
    total = parse_bytes(slots)
    share = total // num_experts.size
    return Budget(np.minimum(share // expert_bytes, num_experts), min(total, everything))


def _whole_slots(
    slots: int, scope: str, num_experts: NDArray[np.int64], expert_bytes: NDArray[np.int64]
) -> Budget:
    most = int(num_experts.max() if scope == "layer" else num_experts.sum())
    if not 0 <= slots <= most:
        where = "of a layer" if scope == "layer" else "in all"
        raise UserError(f"cache.slots is {slots}; the model has 0 to {most} experts {where}")
    if scope == "layer":
        capacity = np.minimum(slots, num_experts)
        return Budget(capacity, int((capacity * expert_bytes).sum()))
    if np.unique(expert_bytes).size > 1:
        raise UserError(
            f"cache.slots={slots} in global scope: this model's experts differ in size, "
            "so give a fraction (0.25) or bytes (8GiB)"
        )
    capacity = np.minimum(slots // num_experts.size, num_experts)
    return Budget(capacity, slots * int(expert_bytes[0]))
