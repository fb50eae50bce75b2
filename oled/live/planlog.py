"""What a live run decided, and what its link did between the decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled.trace.steps import Steps

BEGAN, LOOKED, CROSSED = range(3)
"""What the link did: began a piece of (layer, expert); found nothing to begin, with (1) or without
(0) room, and forgot what was asked for in vain; a piece crossed."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanLog:
    """What was decided, N entries in the order of the layer-steps, as the simulator's `Tally`."""

    plans: NDArray[np.uint8]  # [N] state | place << 2 | stays << 4
    orders: NDArray[np.int32]  # [N] place in the transfer order, -1 if none


LinkLog = NDArray[np.int64]
"""[n, 4] turn of `Decider` after which it happened, BEGAN | LOOKED | CROSSED, layer, expert (or
room, 0)."""


def first_difference(live: PlanLog, simulated: PlanLog, steps: Steps) -> str | None:
    """Where two plan logs part, in words; None where they are equal."""
    if live.plans.size != simulated.plans.size:
        return f"{live.plans.size} entries live, {simulated.plans.size} simulated"
    unequal = _unequal(live, simulated)
    if not unequal.any():
        return None
    entry = int(np.argmax(unequal))
    step = int(np.searchsorted(steps.offsets, entry, side="right")) - 1
    return (
        f"forward {steps.forward[step]}, MoE layer {steps.layer[step]}, expert "
        f"{steps.expert[entry]}: live plan {live.plans[entry]:#04x} place "
        f"{live.orders[entry]}, simulated {simulated.plans[entry]:#04x} place "
        f"{simulated.orders[entry]}"
    )


def equal_share(live: PlanLog, simulated: PlanLog, steps: Steps) -> float:
    """The share of layer-steps that were decided alike in every entry."""
    unequal = _unequal(live, simulated).astype(np.int64)
    wrong = np.diff(np.concatenate([[0], np.cumsum(unequal)])[steps.offsets])
    return float((wrong == 0).mean())


def _unequal(one: PlanLog, other: PlanLog) -> NDArray[np.bool_]:
    return np.asarray((one.plans != other.plans) | (one.orders != other.orders))
