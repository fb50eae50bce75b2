"""What prefetching is worth on the clock: case G16, and where its bytes go."""

from __future__ import annotations

from typing import Any

import pytest

from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
from oled.sim.result import Result
from oled.trace.schema import Geometry
from oled.trace.synthetic import Workload, synthetic_trace

EXPERT_BYTES = 3 * 2048 * 512 * 2
GEOMETRY = Geometry(
    moe_layers=(1, 2, 3, 4),
    experts_per_layer=(64,) * 4,
    top_k=4,
    expert_bytes=(EXPERT_BYTES,) * 4,
    num_layers=5,
    hidden_size=2048,
    moe_intermediate_size=512,
    name="llada2-mini",
)
SATURATED = {"hardware": "laptop_x8", "runtime": "graph_fused", "slots": 12}
IDLE = {"hardware": "rtx5090_xeon8470q", "runtime": "eager_fused", "slots": 24}
LOAD = Workload(requests=3, blocks=4, horizons=3, scores=64)


@pytest.fixture(scope="module")
def traces() -> tuple[PreparedTrace, PreparedTrace]:
    return tuple(PreparedTrace.of(synthetic_trace(GEOMETRY, LOAD, seed=seed)) for seed in (1, 2))  # type: ignore[return-value]


def run(policy: Any, traces: tuple[PreparedTrace, PreparedTrace], **fields: Any) -> Result:
    return simulate(traces[0], policy, calibration=traces[1], references=False, **fields)


def dial(precision: float, recall: float) -> dict[str, Any]:
    """`inter_iteration` with a predictor."""
    part = {"_target_": "oled.policies.prefetch.dial.Dial"}
    return {
        "name": "dial",
        "description": "a dial",
        "admission": "compete",
        "retention": {"_target_": "oled.policies.retention.lru.Lru"},
        "prefetch": {**part, "precision": precision, "recall": recall},
    }


@pytest.mark.parametrize("recall", [0.3, 0.8])
def test_g16_a_poor_predictor_on_a_saturated_link(recall: float, traces: Any) -> None:
    """38 % precision, copies longer than compute: more bytes, and no time won."""
    without = run("inter_iteration", traces, **SATURATED).metrics
    poor = run(dial(0.38, recall), traces, **SATURATED).metrics
    assert without["busy_h2d"] > 0.95
    assert poor["h2d_bytes"] > without["h2d_bytes"]
    assert poor["tpot_ns"] >= without["tpot_ns"]
    assert poor["prefetch_bytes_wasted"] > 0


def test_g16_the_same_predictor_may_gain_on_an_idle_link(traces: Any) -> None:
    without = run("inter_iteration", traces, **IDLE).metrics
    poor = run(dial(0.38, 0.3), traces, **IDLE).metrics
    good = run(dial(1.0, 1.0), traces, **IDLE).metrics
    assert without["busy_h2d"] < 0.6
    assert good["tpot_ns"] < poor["tpot_ns"] < without["tpot_ns"]
    assert good["hit_rate"] > poor["hit_rate"] > without["hit_rate"]
    assert good["h2d_bytes"] == without["h2d_bytes"]
    assert good["prefetch_bytes_wasted"] == 0


POLICIES = [
    "dali",
    "finemoe",
    "hybrimoe",
    "hybrimoe_artefact",
    "mixtral_offloading",
    "moe_infinity",
    "oled_fill",
    "prefetch_dial",
    "promoe",
]


@pytest.mark.parametrize("setting", [SATURATED, IDLE], ids=["saturated", "idle"])
@pytest.mark.parametrize("policy", POLICIES)
def test_useful_wasted_and_late_bytes_add_up(policy: str, setting: Any, traces: Any) -> None:
    metrics = run(policy, traces, **setting).metrics
    metrics = {
        name.removesuffix("_all"): metrics[name] for name in metrics if name.endswith("_all")
    }
    ahead = metrics["h2d_bytes"] - metrics["transfers"] * EXPERT_BYTES
    names = ("prefetch_bytes_useful", "prefetch_bytes_wasted", "prefetch_bytes_late")
    assert ahead == sum(metrics[name] for name in names)
    assert metrics["prefetch_bytes_late"] == metrics["late_prefetches"] * EXPERT_BYTES
    misses = metrics["accesses"] - metrics["hits"]
    served = ("transfers", "late_prefetches", "cpu_executions", "dropped")
    assert misses == sum(metrics[name] for name in served)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_prefetcher_fetches_something_in_time_on_an_idle_link(
    policy: str, traces: Any
) -> None:
    assert run(policy, traces, **IDLE).metrics["prefetch_bytes_useful"] > 0


def test_chunks_let_demand_copies_pass(traces: Any) -> None:
    """In pieces a prefetch is less in the way, and as many experts arrive."""

    def promoe(chunks: int) -> dict[str, Any]:
        part = {"_target_": "oled.policies.prefetch.stride.Stride", "chunks": chunks}
        return {**dial(1.0, 1.0), "prefetch": part}

    whole, pieces = (run(promoe(chunks), traces, **SATURATED).metrics for chunks in (1, 6))
    assert pieces["tpot_ns"] < whole["tpot_ns"]


def test_idle_link_fill_turns_cpu_runs_into_hits(traces: Any) -> None:
    without = run("oled", traces, **{**IDLE, "runtime": "graph_fused"}).metrics
    filled = run("oled_fill", traces, **{**IDLE, "runtime": "graph_fused"}).metrics
    assert filled["hit_rate"] > without["hit_rate"]
    assert filled["cpu_executions"] < without["cpu_executions"]
    assert filled["tpot_ns"] < without["tpot_ns"]
