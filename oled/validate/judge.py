"""The definitions and gates of a validation. The same code computes them for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.sim.metrics import is_decoding
from oled.trace.steps import Steps
from oled.types import Ints

DISTURBED_NS, DISTURBED_SHARE = 400_000, 0.01
TPOT_GATE, FORWARD_GATE, LANE_GATE = 0.02, 0.03, 0.01
RACING_FORWARD_GATE, RACING_LANE_GATE = 0.06, 0.03
LEAST_UNDISTURBED = 0.75  # of the forwards of a configuration; below, the machine is busy
LANES = ("gpu", "h2d", "d2h", "cpu")
PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}

DEFINITIONS = f"""\
Configuration: a policy with a number of slots. Error: live / simulated - 1.
Decisions are identical if of every layer-step all states, places, newcomers that stay and the order
of transfers are; for a policy that prefetches, those that the simulator's functions make when the
link begins and ends the same copies between the same decisions as it did live. "alike": the share
of layer-steps that the simulator decides like the live run by its own clock.
Outputs are identical if every layer-step's numbers are bitwise those of a run in which every expert
has its slot.
A forward lasts from the end of the one before it (or the beginning of its request) to its own end.
It was disturbed if a lane missed any of its own deadlines by more than {DISTURBED_NS / 1e6:g} ms or
{DISTURBED_SHARE:.0%} of the forward. Its live time is the median of its undisturbed repeats;
forwards without any are left out on both sides, "calm" is the share of what is left.
TPOT: time of denoise, commit and decode forwards per token, of all requests in lockstep. Its
percentiles are those of such forwards, each divided by the tokens that one brings on the average.
Lane error: of the time of the jobs that a lane had for experts.
Ranking: Spearman's correlation of TPOT over all configurations; worst swap: the largest live
difference between two configurations that the simulator orders the other way round.
Pass: decisions and outputs identical; of every configuration TPOT within {TPOT_GATE:.0%}, P95 of
the forwards' absolute errors within {FORWARD_GATE:.0%}, each lane within {LANE_GATE:.0%}. Where
decisions are not all alike, because a copy landed microseconds before or after a routing was known,
other experts are copied: {RACING_FORWARD_GATE:.0%} and {RACING_LANE_GATE:.0%} instead.
Busy: fewer than {LEAST_UNDISTURBED:.0%} of a configuration's forwards are left."""


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
    decide_ns: float  # real time of deciding, of a forward in the median
    outputs_error: float = 0.0  # largest difference, as a share of a layer-step's largest output

    @property
    def calm(self) -> NDArray[np.bool_]:
        """Return which forwards [K, F] were undisturbed."""
        return calm(self.live_ns, self.late_ns)

    def median(self, values: Ints) -> NDArray[np.float64]:
        """Return the median of undisturbed repeats: [K, F, ...] -> [F, ...]; NaN without any."""
        found = np.full(values.shape[1:], np.nan)
        for forward in np.flatnonzero(self.calm.any(axis=0)):
            found[forward] = np.median(values[self.calm[:, forward], forward], axis=0)
        return found


def calm(live_ns: Ints, late_ns: Ints) -> NDArray[np.bool_]:
    """Return which forwards were undisturbed, by their times and worst latenesses."""
    return np.asarray(late_ns <= np.minimum(DISTURBED_NS, DISTURBED_SHARE * live_ns))


def is_busy(live_ns: Ints, late_ns: Ints) -> bool:
    """Return whether the machine disturbed too many forwards of a configuration; both i64[K, F]."""
    return float(calm(live_ns, late_ns).any(axis=0).mean()) < LEAST_UNDISTURBED


def tpot(forward_ns: NDArray[np.float64], steps: Steps, kept: NDArray[np.bool_]) -> float:
    """Return nanoseconds a token over the decoding forwards among `kept`; NaN where none are."""
    counted: NDArray[np.bool_] = kept & is_decoding(steps)
    tokens = float(steps.produced[is_decoding(steps)].sum())
    share = counted.sum() / max(1, is_decoding(steps).sum())
    return (
        float(forward_ns[counted].sum()) / (tokens * share) if counted.any() and tokens else np.nan
    )


def row(pair: Pair, steps: Steps) -> dict[str, Any]:
    """Return the figures of one configuration."""
    kept = np.asarray(pair.calm.any(axis=0))
    live, simulated = pair.median(pair.live_ns), pair.simulated_ns.astype(np.float64)
    errors = live[kept] / simulated[kept] - 1
    live_tpot, simulated_tpot = tpot(live, steps, kept), tpot(simulated, steps, kept)
    absolute = np.abs(errors)
    decoding = kept & is_decoding(steps)
    brings = float(steps.produced[is_decoding(steps)].mean())
    percentiles = {
        f"{side}_tpot_ns_{name}": _percentile(times[decoding] / brings, q)
        for side, times in (("live", live), ("simulated", simulated))
        for name, q in PERCENTILES.items()
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
        "outputs_error": pair.outputs_error,
        "prefill_error": _prefill_error(live, simulated, kept & ~is_decoding(steps)),
        "live_tpot_ns": _number(live_tpot),
        "simulated_tpot_ns": _number(simulated_tpot),
        "tpot_error": _number(live_tpot / simulated_tpot - 1),
        **percentiles,
        "forward_error_median": _percentile(errors, 50),
        "forward_error_p95_abs": _percentile(absolute, 95),
        **lanes,
        "undisturbed_share": float(kept.mean()),
        "repeats": len(pair.live_ns),
        "decide_ns_per_forward": pair.decide_ns,
    }


def _prefill_error(
    live: NDArray[np.float64], simulated: NDArray[np.float64], prefill: NDArray[np.bool_]
) -> float | None:
    """Return the error of the forwards `prefill` bool[F] together; None where there are none."""
    return _ratio(float(live[prefill].sum()), float(simulated[prefill].sum()))


def judge(rows: Sequence[dict[str, Any]], *, gated: bool = True) -> dict[str, Any]:
    """Return the figures of all configurations, and the verdict with its reasons.

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
        if gated and r["undisturbed_share"] >= LEAST_UNDISTURBED and r["tpot_error"] is not None:
            reasons += [f"{name}: {reason}" for reason in _beyond_gates(r)]
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


def _beyond_gates(r: dict[str, Any]) -> list[str]:
    """Return what is wrong with the clock of one configuration."""
    racing = r["decided_alike"] < 1.0
    forward_gate = RACING_FORWARD_GATE if racing else FORWARD_GATE
    lane_gate = RACING_LANE_GATE if racing else LANE_GATE
    found = []
    if abs(r["tpot_error"]) > TPOT_GATE:
        found.append(f"TPOT is off by {r['tpot_error']:+.1%} (gate {TPOT_GATE:.0%})")
    if r["forward_error_p95_abs"] > forward_gate:
        p95 = r["forward_error_p95_abs"]
        found.append(f"P95 of forwards is off by {p95:.1%} (gate {forward_gate:.0%})")
    for lane in LANES:
        error = r[f"work_error_{lane}"] or 0.0
        if abs(error) > lane_gate:
            found.append(f"the work of lane {lane} is off by {error:+.1%} (gate {lane_gate:.0%})")
    return found


def ranking(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float]:
    """Return Spearman's correlation of live and simulated TPOT, and the worst swap."""
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
    """Return ranks from 0; equal values share the mean of theirs."""
    below = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2)


def _percentile(values: NDArray[np.float64], q: float) -> float | None:
    return float(np.percentile(values, q)) if values.size else None


def _ratio(live: float, simulated: float) -> float | None:
    """Return live / simulated - 1: None where both are 0, 1 where only the simulated side is 0."""
    if simulated == 0:
        return None if live == 0 else 1.0
    return float(live / simulated - 1)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
