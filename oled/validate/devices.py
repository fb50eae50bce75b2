"""The verdict where lanes are a real device's and last as long as they last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from oled.validate.judge import LEAST_UNDISTURBED, judge

TPOT_MEDIAN_GOAL, TPOT_P95_GOAL, SWAP_GOAL = 0.03, 0.08, 0.03


def definitions(tolerance: float) -> str:
    """What is different from `oled.validate.judge.DEFINITIONS`."""
    return f"""\
On a device: outputs count as identical if no layer-step is off by more than {tolerance:.0%} of its
largest number, since the CPU sums in another order than the GPU. Lanes keep no time; what is put in
are dense parts and heads of a trace, and the time of deciding. A lane's work is that between its
events. Pass: decisions and outputs identical; the median over all configurations of |TPOT error|
within {TPOT_MEDIAN_GOAL:.0%}, its P95 within {TPOT_P95_GOAL:.0%}, the worst swap of the ranking
within {SWAP_GOAL:.0%}; judged only with a profile of this device."""


def judge_device(rows: Sequence[dict[str, Any]], *, gated: bool) -> dict[str, Any]:
    """As `oled.validate.judge.judge`, by the goals above. Not `gated`: no goals for the clock."""
    found = judge(rows, gated=False)
    busy = gated and any(r["undisturbed_share"] < LEAST_UNDISTURBED for r in rows)
    errors = np.abs([r["tpot_error"] for r in rows if r["tpot_error"] is not None])
    p95 = float(np.percentile(errors, 95)) if errors.size else None
    reasons = []
    if gated and not busy:
        for what, value, goal in (
            ("median of |TPOT error|", found["tpot_error_median_abs"], TPOT_MEDIAN_GOAL),
            ("P95 of |TPOT error|", p95, TPOT_P95_GOAL),
            ("worst swap of the ranking", found["ranking_worst_swap"], SWAP_GOAL),
        ):
            if value is not None and value > goal:
                reasons.append(f"{what} is {value:.1%} (goal {goal:.0%})")
    return {
        **found,
        "tpot_error_p95_abs": p95,
        "verdict": "fail" if found["reasons"] or reasons else "busy" if busy else "pass",
        "reasons": [*found["reasons"], *reasons],
    }
