"""What is compared, and what passes. The definitions are the same for both sides.

- A forward's time runs from the end of the forward before it to its own end.
- A forward of one repeat is *undisturbed* if no lane missed any of its own deadlines by more than
  DISTURBED_NS or DISTURBED_SHARE of the forward. This says nothing about the simulator: deadlines
  are the lanes' own.
- The live time of a forward is the median of its undisturbed repeats. Forwards without any are left
  out on both sides; `undisturbed_share` is what is left.
- A lane's work is the nominal time of the jobs that it got, experts only.
- TPOT: time of denoise, commit and decode forwards per token, summed over the same forwards.
- Errors are fractions: live / simulated - 1.
- A configuration is a policy with a number of slots. Decisions are identical if every layer-step's
  states, places, newcomers that stay, and order of transfers are; outputs if every layer-step's
  numbers are bitwise those of a run in which every expert has its slot.
- Ranking: Spearman's rank correlation of TPOT over all configurations; the worst swap is the
  largest live difference (a fraction) between two configurations that the simulator orders the
  other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.sim.metrics import is_decoding
from oled.trace.steps import Steps

DISTURBED_NS, DISTURBED_SHARE = 400_000, 0.01
TPOT_GATE, FORWARD_GATE, LANE_GATE = 0.02, 0.03, 0.01
LEAST_UNDISTURBED = 0.75  # of the forwards of a configuration; below, the machine is busy
LANES = ("gpu", "h2d", "d2h", "cpu")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One configuration on both sides. K repeats, F forwards."""

    policy: str
    slots: int | float | str
    live_ns: Ints  # [K, F]
    late_ns: Ints  # [K, F] worst lateness of any lane
    live_work_ns: Ints  # [K, F, 4] by LANES
    simulated_ns: Ints  # [F]
    simulated_work_ns: Ints  # [F, 4]
    first_difference: str | None  # in the decisions of any repeat
    decided_alike: float  # share of layer-steps that the free-running simulator decides alike
    outputs_identical: bool
    decide_ns: float  # real time of deciding, per forward

    @property
    def calm(self) -> NDArray[np.bool_]:
        """[K, F] forwards that were undisturbed."""
        return calm(self.live_ns, self.late_ns)

    def median(self, values: Ints) -> NDArray[np.float64]:
        """Median over undisturbed repeats: [K, F, ...] -> [F, ...]; NaN where none is."""
        found = np.full(values.shape[1:], np.nan)
        for forward in np.flatnonzero(self.calm.any(axis=0)):
            found[forward] = np.median(values[self.calm[:, forward], forward], axis=0)
        return found


def calm(live_ns: Ints, late_ns: Ints) -> NDArray[np.bool_]:
    """Which forwards were undisturbed, by the times and the worst latenesses of forwards."""
    return np.asarray(late_ns <= np.minimum(DISTURBED_NS, DISTURBED_SHARE * live_ns))


def is_busy(live_ns: Ints, late_ns: Ints) -> bool:
    """Whether the machine disturbed too many forwards of a configuration; both i64[K, F]."""
    return float(calm(live_ns, late_ns).any(axis=0).mean()) < LEAST_UNDISTURBED


def tpot(forward_ns: NDArray[np.float64], steps: Steps, kept: NDArray[np.bool_]) -> float:
    """Nanoseconds a token over the decoding forwards among `kept`; NaN where none are."""
    counted: NDArray[np.bool_] = kept & is_decoding(steps)
    tokens = float(steps.produced[is_decoding(steps)].sum())
    share = counted.sum() / max(1, is_decoding(steps).sum())
    return (
        float(forward_ns[counted].sum()) / (tokens * share) if counted.any() and tokens else np.nan
    )


def row(pair: Pair, steps: Steps) -> dict[str, Any]:
    """The figures of one configuration."""
    kept = np.asarray(pair.calm.any(axis=0))
    live, simulated = pair.median(pair.live_ns), pair.simulated_ns.astype(np.float64)
    errors = live[kept] / simulated[kept] - 1
    live_tpot, simulated_tpot = tpot(live, steps, kept), tpot(simulated, steps, kept)
    absolute = np.abs(errors)
    forwards = {
        f"{side}_forward_ns_{name}": _percentile(times[kept], q)
        for side, times in (("live", live), ("simulated", simulated))
        for name, q in (("p50", 50), ("p95", 95), ("p99", 99))
    }
    work = pair.median(pair.live_work_ns)[kept].sum(axis=0)
    simulated_work = pair.simulated_work_ns[kept].sum(axis=0)
    lanes = {
        f"work_error_{lane}": _ratio(work[i], simulated_work[i]) for i, lane in enumerate(LANES)
    }
    return {
        "policy": pair.policy,
        "slots": pair.slots,
        "decisions_identical": pair.first_difference is None,
        "first_difference": pair.first_difference,
        "decided_alike": pair.decided_alike,
        "outputs_identical": pair.outputs_identical,
        "live_tpot_ns": _number(live_tpot),
        "simulated_tpot_ns": _number(simulated_tpot),
        "tpot_error": _number(live_tpot / simulated_tpot - 1),
        **forwards,
        "forward_error_median": _percentile(errors, 50),
        "forward_error_p95_abs": _percentile(absolute, 95),
        **lanes,
        "undisturbed_share": float(kept.mean()),
        "repeats": len(pair.live_ns),
        "decide_ns_per_forward": pair.decide_ns,
    }


def judge(rows: Sequence[dict[str, Any]], *, gated: bool = True) -> dict[str, Any]:
    """The figures of all configurations, and the verdict with its reasons.

    Not `gated` (lanes that keep no time): decisions and outputs alone decide.
    """
    errors = np.array([np.nan if r["tpot_error"] is None else r["tpot_error"] for r in rows])
    p95 = [r["forward_error_p95_abs"] for r in rows if r["forward_error_p95_abs"] is not None]
    known = np.abs(errors[~np.isnan(errors)])
    calm = float(np.mean([r["undisturbed_share"] for r in rows]))
    wrong, reasons = [], []
    for r in rows:
        name = f"{r['policy']}, {r['slots']} slots"
        if not r["decisions_identical"]:
            wrong.append(f"{name}: decisions differ: {r['first_difference']}")
        if not r["outputs_identical"]:
            wrong.append(f"{name}: outputs are not those of the resident run")
        busy = r["undisturbed_share"] < LEAST_UNDISTURBED or r["tpot_error"] is None
        if gated and not busy and abs(r["tpot_error"]) > TPOT_GATE:
            reasons.append(f"{name}: TPOT is off by {r['tpot_error']:+.1%} (gate {TPOT_GATE:.0%})")
        if gated and not busy and r["forward_error_p95_abs"] > FORWARD_GATE:
            reasons.append(
                f"{name}: P95 of forwards is off by {r['forward_error_p95_abs']:.1%} "
                f"(gate {FORWARD_GATE:.0%})"
            )
        if gated and not busy:
            reasons += [
                f"{name}: the work of lane {lane} is off by {r[f'work_error_{lane}']:+.1%} "
                f"(gate {LANE_GATE:.0%})"
                for lane in LANES
                if abs(r[f"work_error_{lane}"] or 0.0) > LANE_GATE
            ]
    busy = gated and any(r["undisturbed_share"] < LEAST_UNDISTURBED for r in rows)
    verdict = "fail" if wrong or reasons else "busy" if busy else "pass"
    spearman, swap = ranking(rows)
    return {
        "decisions_identical": all(r["decisions_identical"] for r in rows),
        "outputs_identical": all(r["outputs_identical"] for r in rows),
        "tpot_error_median_abs": _number(float(np.median(known))) if known.size else None,
        "tpot_error_max_abs": _number(float(known.max())) if known.size else None,
        "forward_error_p95_abs": max(p95, default=None),
        "undisturbed_share": calm,
        "ranking_spearman": spearman,
        "ranking_worst_swap": swap,
        "verdict": verdict,
        "reasons": [*wrong, *reasons],
    }


def ranking(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float]:
    """Spearman's correlation of live and simulated TPOT, and the worst swap."""
    known = [r for r in rows if r["tpot_error"] is not None]
    live = np.array([r["live_tpot_ns"] for r in known])
    simulated = np.array([r["simulated_tpot_ns"] for r in known])
    worst = 0.0
    for a, b in combinations(range(len(known)), 2):
        if (live[a] - live[b]) * (simulated[a] - simulated[b]) < 0:
            worst = max(worst, abs(live[a] - live[b]) / min(live[a], live[b]))
    if len(known) < 2 or np.ptp(live) == 0 or np.ptp(simulated) == 0:
        return None, worst
    return float(np.corrcoef(_ranks(live), _ranks(simulated))[0, 1]), float(worst)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of theirs."""
    below = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2)


def _percentile(values: NDArray[np.float64], q: float) -> float | None:
    return float(np.percentile(values, q)) if values.size else None


def _ratio(live: float, simulated: float) -> float | None:
    """None where neither side has anything, 1 where only the live side has."""
    if simulated == 0:
        return None if live == 0 else 1.0
    return float(live / simulated - 1)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
