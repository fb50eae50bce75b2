"""The verdict where lanes keep no times and last as long as they last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oled.validate.judge import LEAST_UNDISTURBED, judge
from oled.validate.other_load import MOST, is_loaded


@dataclass(frozen=True, slots=True)
class Goals:
    """The largest errors of the clock that pass."""

    median: float  # over all configurations, of |TPOT error|
    p95: float
    swap: float  # of the ranking
    prefill: bool  # whether the first two hold for the errors of prefill, too


GOALS = {"cuda": Goals(0.03, 0.08, 0.03, False), "cpu": Goals(0.04, 0.10, 0.05, True)}


def definitions(tolerance: float, goals: Goals) -> str:
    """Return what differs from `oled.validate.judge.DEFINITIONS`."""
    outputs = (
        f"Outputs count as identical if no layer-step is off by more than {tolerance:.0%} of its\n"
        f"largest number, since the CPU sums in another order than the GPU."
        if tolerance
        else "Outputs are bitwise identical or not."
    )
    prefill = ", and of prefill errors the same" if goals.prefill else ""
    return f"""\
Real lanes: {outputs} Lanes keep no time; what is put in
are dense parts and heads of a trace, and the time of deciding. A lane's work is the time that its
jobs took. Prefill error: of all forwards that do not count for TPOT, together.
Pass: decisions and outputs identical; the median over all configurations of |TPOT error|
within {goals.median:.0%}, its P95 within {goals.p95:.0%}{prefill}; the worst swap of the ranking
within {goals.swap:.0%}; judged only with a profile of this machine. Busy, too: other processes and
stolen time took more than {MOST:.0%} of the CPUs."""


def judge_device(
    rows: Sequence[dict[str, Any]],
    *,
    gated: bool,
    goals: Goals = GOALS["cuda"],
    load: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Judge as `oled.validate.judge.judge` does, by `goals`. Not `gated`: none for the clock.

    `load`: of `oled.validate.other_load`; None where it is not known.
    """
    found = judge(rows, gated=False)
    busy = gated and (
        any(r["undisturbed_share"] < LEAST_UNDISTURBED for r in rows) or is_loaded(load or {})
    )
    decode, prefill = _errors(rows, "tpot_error"), _errors(rows, "prefill_error")
    checks = [
        ("median of |TPOT error|", decode["median"], goals.median),
        ("P95 of |TPOT error|", decode["p95"], goals.p95),
        ("worst swap of the ranking", found["ranking_worst_swap"], goals.swap),
    ]
    if goals.prefill:
        checks.append(("median of |prefill error|", prefill["median"], goals.median))
        checks.append(("P95 of |prefill error|", prefill["p95"], goals.p95))
    reasons = [
        f"{name} is {value:.1%} (goal {goal:.0%})"
        for name, value, goal in checks
        if gated and not busy and value is not None and value > goal
    ]
    return {
        **found,
        "tpot_error_p95_abs": decode["p95"],
        "prefill_error_median_abs": prefill["median"],
        "prefill_error_p95_abs": prefill["p95"],
        "other_load": None if load is None else dict(load),
        "verdict": "fail" if found["reasons"] or reasons else "busy" if busy else "pass",
        "reasons": [*found["reasons"], *reasons],
    }


def _errors(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float | None]:
    """Return median and 95th percentile of the absolute errors; None where no row has one."""
    errors = np.abs([r[key] for r in rows if r.get(key) is not None])
    if not errors.size:
        return {"median": None, "p95": None}
    return {"median": float(np.median(errors)), "p95": float(np.percentile(errors, 95))}
