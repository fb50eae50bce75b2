"""From the driver's counts to the flat, stable names of `metrics.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.sim import tally as r
from oled.trace.schema import Phase
from oled.trace.steps import Steps
from oled.types import Ints

DECODING = (Phase.DENOISE, Phase.COMMIT, Phase.DECODE, Phase.DRAFT, Phase.VERIFY)
"""Phases whose time makes TPOT."""

_COUNTS = {
    "accesses": r.ACCESSES,
    "hits": r.HITS,
    "transfers": r.TRANSFERS,
    "late_prefetches": r.LATE_MISSES,
    "cpu_executions": r.CPU_MISSES,
    "cpu_executions_resident": r.CPU_RESIDENTS,
    "dropped": r.DROPPED_MISSES,
    "h2d_bytes": r.MOVED_BYTES,
    "prefetch_bytes_useful": r.USEFUL_BYTES,
    "prefetch_bytes_wasted": r.WASTED_BYTES,
    "prefetch_bytes_late": r.LATE_BYTES,
    "stall_ns_copy": r.STALL_COPY,
    "stall_ns_cpu": r.STALL_CPU,
    "stall_ns_policy": r.STALL_POLICY,
    "layer_steps": r.LAYER_STEPS,
    "forwards": r.FORWARDS,
}
_RATIOS = {
    "hit_rate": (r.HITS, r.ACCESSES),
    "hit_rate_tokens": (r.TOKEN_HITS, r.TOKEN_ACCESSES),
    "hit_rate_bytes": (r.BYTES_HIT, r.BYTES_ACCESSED),
    "hit_rate_attainable": (r.RESIDENT_HITS, r.ATTAINABLE),
    "cache_utilization": (r.RESIDENT_HITS, r.SLOTS),
    "dropped_gate_share": (r.DROPPED_MASS, r.GATE_MASS),
    "effective_transfer_ratio": (r.REUSED, r.TRANSFERRED_BEFORE),
    "busy_gpu": (r.BUSY_GPU, r.TIME),
    "busy_h2d": (r.BUSY_H2D, r.TIME),
    "busy_d2h": (r.BUSY_D2H, r.TIME),
    "busy_cpu": (r.BUSY_CPU, r.TIME),
}


def ratio(numerator: float, denominator: float) -> float | None:
    """None where there is nothing to divide by."""
    return None if denominator == 0 else float(numerator) / float(denominator)


def count_metrics(rows: Ints) -> dict[str, Any]:
    """Counts and rates of one phase or of all; rows i64[..., COLUMNS], summed."""
    sums = rows.reshape(-1, r.COLUMNS).sum(axis=0)
    metrics: dict[str, Any] = {name: ratio(sums[a], sums[b]) for name, (a, b) in _RATIOS.items()}
    metrics.update(_adjusted(sums))
    metrics.update({name: int(sums[column]) for name, column in _COUNTS.items()})
    return metrics


def headline(by_phase: Ints) -> dict[str, Any]:
    """Return counts and rates of the decoding forwards, and of all forwards as NAME_all.

    TPOT is of decoding forwards, so what stands beside it is; by_phase i64[requests, phases,
    COLUMNS].
    """
    of_all = {f"{name}_all": value for name, value in count_metrics(by_phase).items()}
    return {**count_metrics(by_phase[:, list(DECODING)]), **of_all}


def _adjusted(sums: Ints) -> dict[str, float | None]:
    """Both readings of an "adjusted hit rate" (arXiv 2609.04895), by bytes.

    With A accesses, D demand misses and P experts copied ahead, used or not: `_as_accesses` is
    (A - D) / (A + P), which fits the published table, and `_as_misses` 1 - (D + P) / A, which is
    what the text says. One copied ahead and late is a demand miss.
    """
    ahead = sums[r.USEFUL_BYTES] + sums[r.WASTED_BYTES]
    accessed, hit = sums[r.BYTES_ACCESSED], sums[r.BYTES_HIT]
    return {
        "adjusted_hit_rate_as_accesses": ratio(hit, accessed + ahead),
        "adjusted_hit_rate_as_misses": ratio(hit - ahead, accessed),
    }


def bytes_per_token(by_phase: Ints, steps: Steps) -> float | None:
    """Bytes copied to the device in decoding forwards, per token produced; i64[., phase, .]."""
    return ratio(
        float(by_phase[:, list(DECODING), r.MOVED_BYTES].sum()), float(steps.produced.sum())
    )


def time_metrics(durations: Ints) -> dict[str, float | None]:
    """Mean and percentiles (linear interpolation) of forward times, i64[n] nanoseconds."""
    names = ("mean", "p50", "p95", "p99")
    if durations.size == 0:
        return {f"forward_ns_{name}": None for name in names}
    values = (durations.mean(), *np.percentile(durations, (50, 95, 99)))
    return {f"forward_ns_{n}": float(v) for n, v in zip(names, values, strict=True)}


def is_decoding(steps: Steps) -> NDArray[np.bool_]:
    """Which forwards count for TPOT, bool[F]."""
    return np.isin(steps.phase, DECODING)


def tokens_of_a_row(steps: Steps, rows: Mapping[int, int]) -> float:
    """Tokens produced, per row of a batch: sum over requests (groups) of produced / rows."""
    return sum(float(steps.produced[steps.request == group].sum()) / n for group, n in rows.items())


def tpot_ns(forward_ns: Ints, steps: Steps, rows: Mapping[int, int]) -> float | None:
    """Time of the decoding forwards per token of one row."""
    return ratio(float(forward_ns[is_decoding(steps)].sum()), tokens_of_a_row(steps, rows))


def ttft_ns(forward_ns: Ints, steps: Steps) -> float | None:
    """Return the mean over requests of the time to the end of the first forward that accepts
    tokens; a batch is one request. None where no token was accepted."""
    waits = []
    for request in np.unique(steps.request):
        own = steps.request == request
        first = np.flatnonzero(steps.accepted[own] > 0)
        if first.size:
            waits.append(int(forward_ns[own][: first[0] + 1].sum()))
    return ratio(float(sum(waits)), len(waits))


def prefill_ns(forward_ns: Ints, steps: Steps) -> float | None:
    """Return the mean over requests of the time to the end of prefill."""
    prefill = steps.phase == Phase.PREFILL
    return ratio(float(forward_ns[prefill].sum()), np.unique(steps.request[prefill]).size)


def latency_metrics(forward_ns: Ints, steps: Steps, rows: Mapping[int, int]) -> dict[str, Any]:
    """Return TPOT, TTFT, throughput and the times of decoding forwards."""
    produced = float(steps.produced.sum())
    return {
        "tpot_ns": tpot_ns(forward_ns, steps, rows),
        "prefill_ns": prefill_ns(forward_ns, steps),
        "ttft_ns": ttft_ns(forward_ns, steps),
        "throughput_tokens_per_s": ratio(1e9 * produced, float(forward_ns.sum())),
        **time_metrics(forward_ns[is_decoding(steps)]),
    }


def request_times(forward_ns: Ints, steps: Steps) -> dict[str, Ints]:
    """Time of the prefill and of the decoding forwards of each request (or group), i64[R]."""
    groups, place = np.unique(steps.request, return_inverse=True)
    found = {}
    for name, own in (
        ("prefill_ns", steps.phase == Phase.PREFILL),
        ("decoding_ns", is_decoding(steps)),
    ):
        found[name] = np.zeros(groups.size, np.int64)
        np.add.at(found[name], place[own], forward_ns[own])
    return found


def bootstrap(
    by_phase: Ints, forward_ns: Ints, steps: Steps, rows: Mapping[int, int], seed: int
) -> dict[str, float | None]:
    """95 % intervals over requests of TPOT and hit rate, both of decoding forwards: 1,000 resamples
    of whole requests."""
    groups = np.unique(steps.request)
    names = ("tpot_ns_low", "tpot_ns_high", "hit_rate_low", "hit_rate_high")
    if groups.size < 2:
        return dict.fromkeys(names)
    place = np.searchsorted(groups, steps.request)
    times = request_times(forward_ns, steps)["decoding_ns"]
    row_count = np.array([rows[int(g)] for g in groups])
    tokens = np.bincount(place, steps.produced, groups.size) / row_count
    decoded = by_phase[:, list(DECODING)].sum(axis=1)
    counts = decoded[:, [r.HITS, r.ACCESSES]].astype(np.float64)
    drawn = np.random.default_rng(seed).integers(groups.size, size=(1000, groups.size))
    result: dict[str, float | None] = {}
    for name, over, under in (
        ("tpot_ns", times, tokens),
        ("hit_rate", counts[:, 0], counts[:, 1]),
    ):
        total = under[drawn].sum(axis=1)
        values = over[drawn].sum(axis=1)[total > 0] / total[total > 0]
        low, high = np.percentile(values, (2.5, 97.5)) if values.size else (None, None)
        result[f"{name}_low"] = None if low is None else float(low)
        result[f"{name}_high"] = None if high is None else float(high)
    return result


def phase_metrics(
    counts: Callable[[Phase], Mapping[str, Any]], forward_ns: Ints, steps: Steps
) -> dict[str, dict[str, Any]]:
    """Return `counts` and times under each phase that occurs."""
    phases = {}
    for phase in Phase:
        times = forward_ns[steps.phase == phase]
        if times.size:
            phases[phase.name.lower()] = {
                **counts(phase),
                **time_metrics(times),
                "time_ns": int(times.sum()),
            }
    return phases
