"""`simulate` for several GPUs: the routing token by token, metrics, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oled
from oled.errors import UserError
from oled.parallel.api import simulate
from oled.parallel.routing import Routing
from oled.trace import (
    NO_EXPERT,
    ConfidenceKind,
    ForwardRecord,
    Manifest,
    TokenState,
    Trace,
    WeightKind,
    trace_of_records,
)
from oled.trace.memory import select_requests
from oled.trace.schema import Geometry, Phase
from oled.trace.synthetic import LAYERED, Workload, synthetic_trace

SHAPE = Geometry(
    moe_layers=(1, 2, 3),
    experts_per_layer=(16,) * 3,
    top_k=3,
    expert_bytes=(3 * 256 * 128 * 2,) * 3,
    num_layers=4,
    hidden_size=256,
    moe_intermediate_size=128,
)
NAMES = [
    "tpot_ns", "prefill_ns", "ttft_ns", "throughput_tokens_per_s",
    "forward_ns_mean", "forward_ns_p50", "forward_ns_p95", "forward_ns_p99",
    "balanced_tpot_ns", "all_resident_tpot_ns",
    "imbalance", "imbalance_tokens", "straggler_ns", "busy_gpu",
    "dense_ns", "compute_ns", "transport_ns", "transport_ns_exposed", "stall_ns_policy",
    "migrations", "migration_bytes", "migration_ns", "transport_bytes", "activations",
    "ranks", "gpu_bytes_total", "gpu_bytes_rank", "layer_steps", "forwards",
    "wall_s", "phases", "provenance",
]  # fmt: skip


@pytest.fixture(scope="module")
def trace() -> Trace:
    load = Workload(requests=5, prompt_blocks=2, blocks=2, block_length=8)
    return synthetic_trace(SHAPE, load, LAYERED, seed=1)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_every_token_lives_on_one_rank_and_is_routed_as_recorded(
    trace: Trace, rows: int, ranks: int
) -> None:
    """Counts of experts are those of the steps; homes are the shares of the forward's tokens."""
    routing = Routing.of(trace, ranks, rows)
    steps = routing.steps
    assert routing.forward.tolist() == steps.forward.tolist()
    assert routing.layer.tolist() == steps.layer.tolist()
    for index in range(steps.num_steps):
        mine = slice(routing.offsets[index], routing.offsets[index + 1])
        counts = np.bincount(routing.expert[mine][routing.expert[mine] >= 0], minlength=16)
        entries = slice(steps.offsets[index], steps.offsets[index + 1])
        assert counts[steps.expert[entries]].tolist() == steps.count[entries].tolist()
        assert counts.sum() == steps.count[entries].sum()
        tokens = int(steps.tokens[routing.forward[index]])
        assert routing.home[mine].tolist() == [i * ranks // tokens for i in range(tokens)]
    assert (routing.tokens.sum(axis=1) == steps.tokens).all()
    if ranks == 1:
        assert routing.context[:, 0].tolist() == steps.context.tolist()


def test_padding_and_unused_slots_have_no_part_in_it() -> None:
    """4 tokens, the first padding: the others live on 0, 0 and 1; 65535 and a zero expert are
    -1."""
    shape = Geometry((0,), (4,), top_k=2, expert_bytes=(8,), num_layers=1, zero_experts=1)
    ids = np.array([[[0, 1], [2, NO_EXPERT], [4, 3], [1, 0]]])
    record = ForwardRecord(
        request=0,
        pass_id=0,
        phase=Phase.DECODE,
        layers=np.array([0]),
        expert_ids=ids,
        weights=np.full(ids.shape, 0.5),
        positions=np.arange(4),
        token_ids=np.arange(4),
        confidence=np.full(4, 0.5),
        state=np.array([TokenState.PAD, *[TokenState.DECODED] * 3]),
        accepted=np.zeros(4, np.uint8),
        context=7,
    )
    manifest = Manifest(shape, WeightKind.SUM_ONE, ConfidenceKind.MAX_PROBABILITY)
    routing = Routing.of(trace_of_records(manifest, [record]), 2, 1)
    assert routing.expert.tolist() == [[2, -1], [-1, 3], [1, 0]]
    assert routing.home.tolist() == [0, 0, 1]
    assert routing.tokens.tolist() == [[2, 1]]
    assert routing.context.tolist() == [[7, 7]]  # a row that is split is attended to on both


def test_whole_rows_live_on_their_ranks(trace: Trace) -> None:
    """Four requests in lockstep on four ranks: each has the tokens and the context of its own."""
    routing = Routing.of(select_requests(trace, [0, 1, 2, 3]), 4, 4)
    alone = [Routing.of(select_requests(trace, [r]), 1, 1).steps for r in range(4)]
    shortest = min(steps.num_forwards for steps in alone)
    for rank, steps in enumerate(alone):
        assert routing.tokens[:shortest, rank].tolist() == steps.tokens[:shortest].tolist()
        assert routing.context[:shortest, rank].tolist() == steps.context[:shortest].tolist()


@pytest.mark.parametrize("policy", ["static_ep", "eplb", "epic"])
@pytest.mark.parametrize("topology", ["nvlink_8", "nodes_2x4", "pcie_gen4_4"])
def test_metrics_hang_together_and_come_out_the_same_again(
    trace: Trace, policy: str, topology: str, tmp_path: Path
) -> None:
    result = simulate(trace, policy, topology, batch_size=4)
    written = json.loads(result.write(tmp_path).read_text())
    assert set(written) == set(NAMES)
    assert all(written[name] is not None for name in NAMES)
    found, phases = result.metrics, result.metrics["phases"]
    assert set(phases) == {"prefill", "denoise", "commit"}
    for name in ("compute_ns", "transport_bytes", "migrations", "layer_steps", "forwards"):
        assert found[name] == sum(phase[name] for phase in phases.values())
    assert found["balanced_tpot_ns"] <= found["tpot_ns"]
    assert found["imbalance"] >= 1.0
    assert found["migration_bytes"] == found["migrations"] * SHAPE.expert_bytes[0]
    assert found["provenance"]["policy"] == policy
    assert found["provenance"]["topology"] == topology
    again = simulate(trace, policy, topology, batch_size=4).metrics
    assert {**again, "wall_s": 0} == {**found, "wall_s": 0}
    assert "TPOT" in result.table()


def test_tpot_is_of_one_row_and_of_decoding_forwards(trace: Trace) -> None:
    result = simulate(trace, "static_ep", "nvlink_8", batch_size=5)
    steps = Routing.of(trace, 8, 5).steps
    decoding = steps.phase != Phase.PREFILL
    took = result.tally.forwards[:, 0]
    assert result.metrics["tpot_ns"] == took[decoding].sum() / (steps.produced.sum() / 5)
    assert result.metrics["prefill_ns"] == took[~decoding].sum()


def test_more_gpus_share_the_experts_memory_and_spare_slots_cost_some(trace: Trace) -> None:
    of = {p: simulate(trace, p, "nvlink_8").metrics for p in ("static_ep", "epic")}
    size = 3 * SHAPE.expert_bytes[0]
    assert of["static_ep"]["gpu_bytes_rank"] == 2 * size
    assert of["epic"]["gpu_bytes_rank"] == 4 * size
    assert of["epic"]["gpu_bytes_total"] == 8 * 4 * size


def test_one_gpu_holds_everything_and_takes_the_time_of_all_resident(trace: Trace) -> None:
    alone = {"name": "one", "description": "", "nodes": 1, "gpus_per_node": 1}
    link = {"low": 1, "value": 1, "high": 1, "tag": "assumed", "source": "test"}
    alone |= {"bandwidth": {**link, "unit": "GB/s"}, "latency": {**link, "unit": "us"}}
    found = simulate(trace, "static_ep", alone, batch_size=2).metrics
    assert found["tpot_ns"] == found["all_resident_tpot_ns"]
    assert found["imbalance"] == 1.0
    one = oled.simulate(trace, "lru", slots=16, hardware="h100_sxm", batch_size=2).metrics
    assert found["tpot_ns"] == one["all_resident_tpot_ns"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: simulate(t, "lru"), "policy 'lru' runs on one GPU; it has no topology"),
        (
            lambda t: oled.simulate(t, "epic"),
            "'epic' places experts on several GPUs: give topology",
        ),
        (lambda t: simulate(t, "epick"), "did you mean 'epic'"),
        (lambda t: simulate(t, "epic", "nvlink"), "did you mean 'nvlink_8'"),
        (lambda t: simulate(t, "epic", batch_size=0), "batch_size is 0"),
        (lambda t: simulate(t, system(transport="fast")), "transport is 'fast'"),
        (lambda t: simulate(t, system(chunks=0)), "chunks is 0"),
        (lambda t: simulate(t, system(chunk=2)), "unknown key 'chunk': did you mean 'chunks'"),
        (lambda t: simulate(t, system(name=None)), "'name' is missing"),
        (lambda t: simulate(t, system(placement={"_target_": LRU})), "Lru is no Placement"),
        (lambda t: simulate(t, system(placement={"_target_": STATIC, "spare": 1})), "has none"),
        (lambda t: simulate(t, system(placement={"_target_": STATIC, "spares": 1})), "no 'spares'"),
    ],
)
def test_mistakes_are_said_in_one_line(trace: Trace, call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        call(trace)
    assert "\n" not in str(refused.value)


LRU = "oled.policies.retention.lru.Lru"
STATIC = "oled.parallel.placements.static.Static"


def system(**changes: Any) -> dict[str, Any]:
    plain = {"name": "mine", "description": "", "placement": {"_target_": STATIC}}
    return {key: value for key, value in {**plain, **changes}.items() if value is not None}
