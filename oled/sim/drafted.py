"""What drafting was worth: the same policy on what plain decoding would have recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.hardware import CostTables
from oled.policies.composition import Composition
from oled.sim import metrics as m
from oled.sim.calibration import Calibration
from oled.sim.prepared import PreparedTrace
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.trace.schema import Phase

BESIDE_PLAIN = (
    "undrafted_tpot_ns",
    "undrafted_hit_rate",
    "undrafted_decode_h2d_bytes_per_token",
    "relative_verify_cost",
)
LOST = frozenset({"scores"})
"""What plain decoding's reconstruction does not have; policies that need it have no comparison."""


def beside_plain(
    subject: PreparedTrace,
    costs: CostTables,
    composition: Composition,
    budget: Budget,
    settings: Settings,
    learned: Calibration | None,
    forward_ns: NDArray[np.int64],
) -> dict[str, Any]:
    """TPOT, hit rate and bytes of plain decoding under the same policy, and what a verification
    costs relative to a plain step. `costs` are those of `subject.undrafted()`; forward_ns [F]."""
    if composition.needs & LOST:
        return dict.fromkeys(BESIDE_PLAIN)
    plain = subject.undrafted().steps
    quiet = dataclasses.replace(settings, timeline=None, plans=False)
    tally = subject.undrafted().replay(costs, composition, budget, quiet, learned).tally
    plain_ns = tally.end_ns - tally.begin_ns
    step = plain_ns[np.isin(plain.phase, (Phase.DENOISE, Phase.DECODE))]
    verify = forward_ns[subject.steps.phase == Phase.VERIFY]
    rows = {int(request): 1 for request in np.unique(plain.request)}
    found = (
        m.tpot_ns(plain_ns, plain, rows),
        m.headline(tally.by_phase)["hit_rate"],
        m.bytes_per_token(tally.by_phase, plain),
    )
    cost = m.ratio(float(verify.mean()), float(step.mean()))
    return dict(zip(BESIDE_PLAIN, (*found, cost), strict=True))
