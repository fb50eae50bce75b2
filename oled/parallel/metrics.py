"""From the clock's counts to the names of `metrics.json`."""

from __future__ import annotations

from typing import Any

from oled.parallel import clock as c
from oled.parallel.routing import Routing
from oled.sim import metrics as m
from oled.trace.schema import Phase
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


def times(routing: Routing, forward_ns: Ints, least_ns: Ints) -> dict[str, Any]:
    """TPOT and its like; `balanced_tpot_ns` is the bound that no placement beats."""
    steps, rows = routing.steps, routing.rows
    produced = float(steps.produced.sum())
    return {
        "tpot_ns": m.tpot_ns(forward_ns, steps, rows),
        "ttft_ns": m.ttft_ns(forward_ns, steps),
        "throughput_tokens_per_s": m.ratio(1e9 * produced, float(forward_ns.sum())),
        **m.time_metrics(forward_ns[m.is_decoding(steps)]),
        "balanced_tpot_ns": m.tpot_ns(least_ns, steps, rows),
    }


def counts(forwards: Ints, ranks: int) -> dict[str, Any]:
    """Sums and ratios over forwards i64[F, COLUMNS].

    `imbalance` is the busiest rank's computing time over the mean, `imbalance_tokens` the same of
    (token, expert) pairs: both ratios of sums, 1 where all are equal. `busy_gpu` is the share of
    the time in which a rank computes, dense parts counted as the slowest rank's.
    """
    sums = forwards.sum(axis=0)
    computed = float(sums[c.COMPUTE_ALL]) / ranks
    return {
        "imbalance": m.ratio(float(sums[c.COMPUTE]), computed),
        "imbalance_tokens": m.ratio(float(ranks * sums[c.PAIRS_BUSIEST]), float(sums[c.PAIRS])),
        "busy_gpu": m.ratio(float(sums[c.DENSE]) + computed, float(sums[c.TIME])),
        **{name: int(sums[column]) for name, column in _COUNTS.items()},
    }


def by_phase(routing: Routing, forwards: Ints, ranks: int) -> dict[str, dict[str, Any]]:
    """The same counts under each phase that occurs."""
    phases = {}
    for phase in Phase:
        mine = forwards[routing.steps.phase == phase]
        if len(mine):
            phases[phase.name.lower()] = {
                **counts(mine, ranks),
                **m.time_metrics(mine[:, c.TIME]),
                "forwards": len(mine),
                "time_ns": int(mine[:, c.TIME].sum()),
            }
    return phases
