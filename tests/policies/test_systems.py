"""Named systems on the clock: what sets each apart, seen in its counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oled.policies.allocation.whole_layers import WholeLayers
from oled.policies.interface import ON_CPU, TRANSFER
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
from oled.sim.result import Result
from oled.trace.schema import Phase
from oled.trace.synthetic import Workload, synthetic_trace

from .test_prefetch_worth import GEOMETRY


@pytest.fixture(scope="module")
def traces() -> tuple[PreparedTrace, PreparedTrace]:
    load = Workload(requests=2, blocks=3, horizons=3, scores=64)
    return tuple(PreparedTrace.of(synthetic_trace(GEOMETRY, load, seed=seed)) for seed in (1, 2))  # type: ignore[return-value]


def run(policy: Any, traces: tuple[PreparedTrace, PreparedTrace], **fields: Any) -> Result:
    options = {"slots": 16, "references": False, "plans": True, **fields}
    return simulate(traces[0], policy, calibration=traces[1], **options)


def test_whole_layers_by_hand() -> None:
    even, experts = np.array([3, 3, 3]), np.array([4, 4, 4])
    size = np.array([1, 1, 1])
    assert WholeLayers().initial(even, experts, size).tolist() == [0, 4, 4]
    assert WholeLayers().initial(np.array([1, 1, 1]), experts, size).tolist() == [0, 0, 0]
    assert WholeLayers().initial(experts, experts, size).tolist() == [4, 4, 4]
    # Experts of 1, 3 and 1 bytes: 15 in all are too few for the two last layers' 4 + 12.
    assert WholeLayers().initial(even, experts, np.array([1, 3, 1])).tolist() == [0, 0, 4]


def test_llama_cpp_computes_whole_layers_on_one_side(traces: Any) -> None:
    result = run("llama_cpp", traces, slots=32)
    denoise = result.metrics["phases"]["denoise"]
    assert denoise["transfers"] == 0
    assert denoise["hit_rate"] == pytest.approx(0.5, abs=0.1)
    per_layer = result.per_layer
    assert per_layer["cpu_executions"][:2].min() > 0
    assert per_layer["cpu_executions"][2:].max() == 0
    assert result.metrics["phases"]["prefill"]["cpu_executions"] == 0


def test_static_systems_move_nothing_and_agree_where_the_cpu_is_always_cheaper(traces: Any) -> None:
    names = ("ktransformers", "fiddler")
    static = [run(name, traces).metrics for name in names]
    assert all(metrics["transfers"] == 0 for metrics in static)
    assert static[0]["tpot_ns"] == static[1]["tpot_ns"]
    assert static[0]["hits"] == static[1]["hits"]


def test_fiddlers_transfers_are_not_kept(traces: Any) -> None:
    result = run("fiddler_artefact", traces, slots=4)
    busy = result.replay.tally.plans
    assert result.metrics["transfers_all"] == np.count_nonzero((busy >> 2 & 3) == TRANSFER)
    assert result.metrics["transfers"] > 0
    assert not np.any(busy >> 4)  # nobody stays


def test_tide_copies_in_refreshes_only(traces: Any) -> None:
    steps = traces[0].steps
    result = run("tide", traces)
    copied = (result.replay.tally.plans >> 2 & 3) == TRANSFER
    forward = np.repeat(steps.forward, np.diff(steps.offsets))[copied]
    phase, block, number = steps.phase[forward], steps.block[forward], steps.step[forward]
    refresh = (phase == Phase.PREFILL) | (block == 0) | ((number >= 0) & (number % 4 == 0))
    assert refresh.all()
    assert np.any(block > 0)
    assert result.metrics["h2d_bytes"] == result.metrics["transfers"] * GEOMETRY.expert_bytes[0]


def test_tides_code_decides_the_same_and_takes_longer(traces: Any) -> None:
    paper, artefact = run("tide", traces), run("tide_artefact", traces)
    np.testing.assert_array_equal(paper.replay.tally.plans, artefact.replay.tally.plans)
    assert artefact.metrics["tpot_ns"] > paper.metrics["tpot_ns"]
    assert artefact.metrics["busy_d2h"] > paper.metrics["busy_d2h"]


def test_llama_cpps_cache_computes_half_of_the_misses_once_full(traces: Any) -> None:
    steps, plans = traces[0].steps, run("llama_cpp_cache", traces).replay.tally.plans
    place = plans >> 2 & 3
    begins = steps.offsets[:-1]
    copied = np.add.reduceat(place == TRANSFER, begins, dtype=int)
    on_cpu = np.add.reduceat(place == ON_CPU, begins, dtype=int)
    filling = on_cpu == 0
    np.testing.assert_array_equal(on_cpu[~filling], (copied + on_cpu)[~filling] // 2)
    assert np.count_nonzero(filling & (copied > 1)) < 0.2 * steps.num_steps


def test_hybrids_may_compute_residents_on_the_cpu(traces: Any) -> None:
    assert run("hybrimoe_artefact", traces, slots=48).metrics["cpu_executions_resident"] > 0
    assert run("oled", traces, slots=48).metrics["cpu_executions_resident"] == 0


def test_sharing_with_the_cpu_beats_copying_alone(traces: Any) -> None:
    """The order of the prototype."""
    shared = ("oled", "oled_exact", "oled_fill", "hybrimoe", "dali")
    names = (*shared, "inter_iteration", "naive_lru")
    tpot = {name: run(name, traces, slots=8).metrics["tpot_ns"] for name in names}
    assert max(tpot[name] for name in shared) < tpot["inter_iteration"] < tpot["naive_lru"]
