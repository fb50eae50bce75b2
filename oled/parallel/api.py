"""`simulate` for several GPUs; the command line is a thin shell over it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oled.errors import UserError
from oled.hardware import CostTables, Profile, Runtime, build_costs, load_profile, load_runtime
from oled.hardware.shape import resolve
from oled.models.catalogue import ModelGeometry, model_geometry
from oled.parallel import clock
from oled.parallel.clock import Around
from oled.parallel.metrics import counts
from oled.parallel.prices import Prices
from oled.parallel.routing import Routing
from oled.parallel.system import System, load_system
from oled.parallel.topology import Topology, load_topology
from oled.paths import trace_path
from oled.sim import metrics as m
from oled.sim.references import references
from oled.sim.result import Outcome
from oled.trace import Trace, load


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Result(Outcome):
    """The result of one simulation on several GPUs."""

    tally: clock.Tally


def simulate(
    trace: Trace | str | Path = "demo",
    policy: str | Path | Mapping[str, Any] | System = "epic",
    topology: str | Path | Mapping[str, Any] | Topology = "nvlink_8",
    *,
    hardware: str | Path | Mapping[str, Any] | Profile = "h100_sxm",
    runtime: str | Path | Mapping[str, Any] | Runtime = "graph_fused",
    batch_size: int = 1,
    geometry: str | None = None,
) -> Result:
    """Replay `trace` on the GPUs of `topology`, each of the kind that `hardware` names.

    All experts are resident, each on at least one rank; `geometry` is as in `oled.simulate`. Raises
    UserError (one line) for whatever the user can mend.
    """
    began = time.perf_counter()
    system, links = load_system(policy), load_topology(topology)
    if batch_size < 1:
        raise UserError(f"workload.batch_size is {batch_size}; it must be at least 1")
    loaded = trace if isinstance(trace, Trace) else load(trace_path(trace))
    routing = Routing.of(loaded, links.ranks, batch_size)
    profile = hardware if isinstance(hardware, Profile) else load_profile(hardware)
    preset = runtime if isinstance(runtime, Runtime) else load_runtime(runtime)
    other = None if geometry is None else model_geometry(geometry)
    costs = _costs(loaded, routing, profile, preset, other)
    token_bytes = resolve(loaded.geometry, other).activation_bytes
    prices = Prices.of(costs, links, routing.steps.num_experts, token_bytes, routing.steps.top_k)
    tally = clock.run(routing, prices, _around(routing, costs), system)
    found = _metrics(routing, tally, prices, system)
    found["all_resident_tpot_ns"] = _on_one_gpu(loaded, routing, profile, preset, other)
    found["wall_s"] = time.perf_counter() - began
    found["phases"] = m.phase_metrics(
        lambda phase: counts(tally.forwards[routing.steps.phase == phase], links.ranks),
        tally.forwards[:, clock.TIME],
        routing.steps,
    )
    found["provenance"] = {
        "trace": loaded.path.name,
        "trace_hash": loaded.hash,
        **_origin(system, links),
        "settings": {"batch_size": batch_size, "geometry": geometry},
        "hardware": profile.name,
        "runtime": preset.name,
        "costs": dict(costs.provenance),
        "labels": [*costs.labels, *_labels(token_bytes)],
    }
    return Result(found, tally)


def _origin(system: System, links: Topology) -> dict[str, Any]:
    """Return what was put together, for `provenance`."""
    return {
        "policy": system.name,
        "policy_source": system.source,
        "placement": {
            "name": type(system.placement).__name__,
            **dataclasses.asdict(system.placement),
            "transport": system.transport.value,
            "chunks": system.chunks,
        },
        "topology": links.name,
        "links": dict(links.numbers),
    }


def _costs(
    trace: Trace,
    routing: Routing,
    profile: Profile,
    runtime: Runtime,
    other: ModelGeometry | None,
) -> CostTables:
    """Return a rank's costs: dense and head times are [F * R], of the tokens that live there."""
    return build_costs(
        trace.geometry,
        routing.tokens.reshape(-1),
        routing.context.reshape(-1),
        int(routing.steps.tokens.max(initial=1)),
        profile,
        runtime,
        other,
        rows=routing.shares,
    )


def _around(routing: Routing, costs: CostTables) -> Around:
    """Return the slowest rank's times; a rank without tokens has nothing to do."""
    works = routing.tokens > 0
    slowest = [
        np.where(works, each.reshape(works.shape), 0).max(axis=1)
        for each in (costs.dense_ns, costs.head_ns)
    ]
    return Around(slowest[0], slowest[1], costs.policy_ns)


def _on_one_gpu(
    trace: Trace,
    routing: Routing,
    profile: Profile,
    runtime: Runtime,
    other: ModelGeometry | None,
) -> float | None:
    """Return the TPOT of one GPU that holds everything, without policy and runtime."""
    steps = routing.steps
    most = int(steps.tokens.max(initial=1))
    costs = build_costs(
        trace.geometry,
        steps.tokens,
        steps.context,
        most,
        profile,
        runtime,
        other,
        rows=steps.rows,
    )
    return m.tpot_ns(references(steps, costs).all_resident_ns, steps, routing.rows)


def _metrics(
    routing: Routing, tally: clock.Tally, prices: Prices, system: System
) -> dict[str, Any]:
    """Return everything but references, phases and provenance.

    `balanced_tpot_ns` is a lower bound of TPOT for any placement.
    """
    ranks, steps, rows = prices.topology.ranks, routing.steps, tally.forwards
    slots = system.placement.slots(prices.num_experts, ranks)
    of_a_rank = int((slots * prices.expert_bytes).sum())
    return {
        **m.latency_metrics(rows[:, clock.TIME], steps, routing.rows),
        "balanced_tpot_ns": m.tpot_ns(rows[:, clock.LEAST], steps, routing.rows),
        **counts(rows, ranks),
        "ranks": ranks,
        "gpu_bytes_total": ranks * of_a_rank,
        "gpu_bytes_rank": of_a_rank,
    }


def _labels(token_bytes: int) -> list[str]:
    if token_bytes:
        return []
    return ["partial_cost: tokens travel for free (the model's hidden size is not known)"]
