"""Metrics of several GPUs from the clock's counts."""

from __future__ import annotations

from typing import Any

from oled.parallel import clock as c
from oled.sim.metrics import ratio
from oled.types import Ints

_COUNTS = {
    "layer_steps": c.LAYER_STEPS,
    "dense_ns": c.DENSE,
    "compute_ns": c.COMPUTE,
    "transport_ns": c.TRANSPORT,
    "transport_ns_exposed": c.TRANSPORT_SHOWN,
    "stall_ns_policy": c.POLICY,
    "straggler_ns": c.STRAGGLE,
    "migration_ns": c.MOVING,
    "migrations": c.MOVES,
    "migration_bytes": c.MOVED_BYTES,
    "transport_bytes": c.SENT_BYTES,
    "activations": c.ACTIVATIONS,
}


def counts(forwards: Ints, ranks: int) -> dict[str, Any]:
    """Return sums and ratios over forwards i64[F, COLUMNS].

    `imbalance` is the busiest rank's computing time over the mean, `imbalance_tokens` the same of
    (token, expert) pairs: both ratios of sums, 1 where all are equal. `busy_gpu` is the share of
    the time in which a rank computes, dense parts counted as the slowest rank's.
    """
    sums = forwards.sum(axis=0)
    computed = float(sums[c.COMPUTE_ALL]) / ranks
    return {
        "imbalance": ratio(float(sums[c.COMPUTE]), computed),
        "imbalance_tokens": ratio(float(ranks * sums[c.PAIRS_BUSIEST]), float(sums[c.PAIRS])),
        "busy_gpu": ratio(float(sums[c.DENSE]) + computed, float(sums[c.TIME])),
        **{name: int(sums[column]) for name, column in _COUNTS.items()},
        "forwards": len(forwards),
    }
