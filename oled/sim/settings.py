"""What a simulation is told besides trace, policy and machine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from oled.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """DESIGN words: `cache.*`, `cost.geometry`, `workload.batch_size`."""

    slots: int | float | str = 40
    scope: str = "layer"
    staging: int | str = 8  # slots that transfers land in, one pool; or "unbounded"
    lifecycle: str = "request"
    batch_size: int = 1
    geometry: str | None = None  # cost.geometry: expert bytes, dense and head times of that model
    cpu_kernel: Literal["tuned", "torch"] = "tuned"  # cost.cpu_kernel: which CPU expert code
    pinned: bool = True  # cost.pinned: copies from pinned host memory
    timeline: tuple[int, int] | None = None  # (first forward, number of forwards) to record
    references: bool = True
    plans: bool = False  # keep the plan log
    seed: int = 0

    def __post_init__(self) -> None:
        if self.lifecycle not in ("request", "persistent"):
            raise UserError(
                f"cache.lifecycle is '{self.lifecycle}'; it is 'request' or 'persistent'"
            )
        staging = self.staging
        if staging != "unbounded" and (not isinstance(staging, int) or staging < 0):
            raise UserError(f"cache.staging is {staging!r}; write a number >= 0 or 'unbounded'")
        if self.cpu_kernel not in ("tuned", "torch"):
            raise UserError(f"cost.cpu_kernel is '{self.cpu_kernel}'; it is 'tuned' or 'torch'")
        if self.batch_size < 1:
            raise UserError(f"workload.batch_size is {self.batch_size}; it must be at least 1")

    @property
    def unbounded(self) -> bool:
        """Accounting replay: transfers never wait for a slot."""
        return self.staging == "unbounded"

    @property
    def staging_slots(self) -> int:
        return 0 if self.unbounded else int(self.staging)
