"""The service times that both sides get: the simulator computes with them, the lanes keep them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.hardware import CostTables


@dataclass(frozen=True, slots=True)
class Pace:
    """Everything takes `dilation` times as long as on the machine of the profile.

    The emulated lanes do real work, which must be small against what it stands for. Not `kept`:
    jobs last as long as they last, and what is not computed (dense parts, heads) takes no time.
    """

    dilation: float = 3.0
    kept: bool = True

    def __post_init__(self) -> None:
        if not self.dilation > 0:
            raise UserError(f"pace.dilation is {self.dilation}; it must be above 0")

    def of(self, costs: CostTables) -> CostTables:
        """Return the costs of the same machine in slow motion."""

        def slow(times: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.ascontiguousarray(np.rint(times * self.dilation).astype(np.int64))

        return replace(
            costs,
            head_ns=slow(costs.head_ns * int(self.kept)),
            dense_ns=slow(costs.dense_ns * int(self.kept)),
            gpu_ns=slow(costs.gpu_ns),
            cpu_ns=slow(costs.cpu_ns),
            cpu_call_ns=round(costs.cpu_call_ns * self.dilation),
            act_out_ns=slow(costs.act_out_ns),
            act_back_ns=slow(costs.act_back_ns),
            copy_ns=slow(costs.copy_ns),
            copy_wake_ns=round(costs.copy_wake_ns * self.dilation),
            copy_out_ns=slow(costs.copy_out_ns),
            policy_ns=round(costs.policy_ns * self.dilation),
        )
