"""`simulate` on a made-up trace: the metrics that people read, and how they hang together."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from altered.split.fitting import fitting

from oled.errors import UserError
from oled.policies.composition import composition_names
from oled.sim.api import simulate
from oled.sim.metrics import DECODING, count_metrics
from oled.sim.prepared import PreparedTrace
from oled.sim.tally import RESIDENT_HITS
from oled.trace.memory import select_requests
from oled.trace.schema import Geometry, Phase
from oled.trace.synthetic import LAYERED, Workload, synthetic_trace

from .build import Forward, compose, make_steps, replay

GEOMETRY = Geometry(
    moe_layers=(1, 2, 3),
    experts_per_layer=(16,) * 3,
    top_k=3,
    expert_bytes=(3 * 256 * 128 * 2,) * 3,
    num_layers=4,
    hidden_size=256,
    moe_intermediate_size=128,
)
LOAD = Workload(requests=4, prompt_blocks=2, blocks=2, block_length=8, horizons=2, scores=16)
NAMES = [
    "tpot_ns", "prefill_ns", "ttft_ns", "decode_h2d_bytes_per_token", "throughput_tokens_per_s",
    "forward_ns_mean", "forward_ns_p50", "forward_ns_p95", "forward_ns_p99",
    "hit_rate_all", "transfers_all", "h2d_bytes_all",
    "hit_rate", "hit_rate_tokens", "hit_rate_bytes", "hit_rate_attainable", "cache_utilization",
    "accesses", "hits", "transfers", "cpu_executions", "h2d_bytes",
    "prefetch_bytes_useful", "prefetch_bytes_wasted", "prefetch_bytes_late",
    "effective_transfer_ratio", "stall_ns_copy", "stall_ns_cpu", "stall_ns_policy",
    "busy_gpu", "busy_h2d", "busy_d2h", "busy_cpu",
    "all_resident_tpot_ns", "ideal_tpot_ns", "bound_relaxed_tpot_ns",
    "ref_belady_uniform_tpot_ns", "ref_belady_pooled_tpot_ns",
    "ref_belady_uniform_hit_rate", "ref_belady_pooled_hit_rate",
    "gpu_bytes_total", "layer_steps", "wall_s", "phases", "provenance",
]  # fmt: skip
"""What DESIGN §5 promises."""
COUNTS = (
    "accesses",
    "hits",
    "transfers",
    "late_prefetches",
    "cpu_executions",
    "dropped",
    "h2d_bytes",
    "prefetch_bytes_useful",
    "prefetch_bytes_wasted",
    "prefetch_bytes_late",
    "stall_ns_copy",
    "stall_ns_cpu",
    "stall_ns_policy",
    "layer_steps",
    "forwards",
)


@pytest.fixture(scope="module")
def traces():
    """What is judged and what is learned from."""
    return tuple(synthetic_trace(GEOMETRY, LOAD, LAYERED, seed=seed) for seed in (1, 2))


@pytest.fixture(scope="module")
def subjects(traces):
    return tuple(PreparedTrace.of(trace) for trace in traces)


def run(subjects, policy, **fields):
    options = {"slots": 5, "references": False, **fields}
    return simulate(fitting(subjects[0], policy), policy, calibration=subjects[1], **options)


def without_wall(metrics):
    return {k: v for k, v in metrics.items() if k != "wall_s"}


def test_every_promised_name_is_written(subjects, tmp_path):
    result = run(subjects, "oled", references=True)
    written = json.loads(result.write(tmp_path).read_text())
    assert set(NAMES) <= set(written)
    assert all(written[name] is not None for name in NAMES)
    assert set(written["phases"]) == {"prefill", "denoise", "commit"}
    for phase in written["phases"].values():
        rates = {"hit_rate", "busy_gpu", "forward_ns_p99", "effective_transfer_ratio"}
        assert {*COUNTS, *rates} <= set(phase)


@pytest.mark.parametrize("policy", composition_names())
def test_the_same_input_and_seed_give_the_same_metrics(policy, subjects):
    one, other = (run(subjects, policy, seed=3) for _ in range(2))
    assert without_wall(one.metrics) == without_wall(other.metrics)


@pytest.mark.parametrize("policy", ["oled", "hybrimoe", "promoe", "tide_artefact", "llama_cpp"])
def test_phases_and_layers_add_up_to_the_whole(policy, subjects):
    result = run(subjects, policy)
    whole, phases = result.metrics, result.metrics["phases"].values()
    decoding = [phase for name, phase in result.metrics["phases"].items() if name != "prefill"]
    for name in COUNTS:
        assert whole[f"{name}_all"] == sum(phase[name] for phase in phases), name
        assert whole[name] == sum(phase[name] for phase in decoding), name
    assert sum(phase["time_ns"] for phase in phases) == result.forward_ns.sum()
    assert whole["hit_rate"] == whole["hits"] / whole["accesses"]
    for name in ("accesses", "hits", "transfers", "cpu_executions"):
        assert result.per_layer[name].sum() == whole[f"{name}_all"]
    slots = result.per_layer["slots"].sum()  # llama_cpp places whole layers: none fits here
    resident = replay_hits(result)
    assert whole["cache_utilization_all"] == (resident / slots if slots else None)


def replay_hits(result):
    """Hits on residents: what was fetched ahead and waited in staging took no resident slot."""
    return int(result.replay.tally.by_phase[..., RESIDENT_HITS].sum())


def test_times_by_hand(subjects):
    """TPOT, TTFT, throughput and percentiles from the times of the forwards."""
    result, steps = run(subjects, "oled"), subjects[0].steps
    decoding = np.isin(steps.phase, DECODING)
    took = result.forward_ns
    assert result.metrics["tpot_ns"] == took[decoding].sum() / steps.produced.sum()
    assert result.metrics["prefill_ns"] == took[steps.phase == Phase.PREFILL].sum() / 4
    waits = 0  # until the first forward of each request that accepts tokens
    for request in range(4):
        own = np.flatnonzero(steps.request == request)
        waits += took[own[: np.flatnonzero(steps.accepted[own])[0] + 1]].sum()
    assert result.metrics["ttft_ns"] == waits / 4 > result.metrics["prefill_ns"]
    assert result.metrics["throughput_tokens_per_s"] == pytest.approx(
        1e9 * steps.produced.sum() / took.sum()
    )
    assert result.metrics["forward_ns_mean"] == took[decoding].mean()
    assert result.metrics["forward_ns_p95"] == np.percentile(took[decoding], 95)


def test_intervals_contain_the_point(subjects):
    for policy in ("inter_iteration", "oled"):
        found = run(subjects, policy).metrics
        assert found["tpot_ns_low"] <= found["tpot_ns"] <= found["tpot_ns_high"]
        assert found["hit_rate_low"] <= found["hit_rate"] <= found["hit_rate_high"]
        assert found["tpot_ns_low"] < found["tpot_ns_high"]


def test_one_request_has_no_interval(traces, subjects):
    alone = PreparedTrace.of(select_requests(traces[0], [0]))
    found = simulate(alone, "inter_iteration", slots=5, references=False).metrics
    assert found["tpot_ns_low"] is None


def test_references_stand_in_their_order(subjects):
    for policy in ("inter_iteration", "oled", "cpu_all"):
        found = run(subjects, policy, references=True, runtime="eager_fused").metrics
        assert found["bound_relaxed_tpot_ns"] <= found["tpot_ns"]
        assert found["bound_relaxed_tpot_ns"] <= found["ideal_tpot_ns"]
        assert found["all_resident_tpot_ns"] < found["ideal_tpot_ns"]
        assert found["ref_belady_uniform_hit_rate"] <= found["ref_belady_pooled_hit_rate"]
        assert found["no_cache_tpot_ns"] > found["ref_belady_pooled_tpot_ns"]


def test_all_hits_take_the_ideal_time(subjects):
    """Everything resident from the start, no policy time: `ideal` to the nanosecond."""
    found = run(subjects, "cpu_all", slots=1.0, references=True).metrics
    assert found["hit_rate"] == 1.0
    assert found["tpot_ns"] == found["ideal_tpot_ns"]


def test_gpu_memory_counts_residents_and_staging(subjects):
    size = GEOMETRY.expert_bytes[0]
    assert run(subjects, "lru", staging=4).metrics["gpu_bytes_total"] == (3 * 5 + 4) * size
    pooled = run(subjects, "oracle_pooled", slots="10MB", staging=2).metrics
    assert pooled["gpu_bytes_total"] == min(10**7, 48 * size) + 2 * size


# ---- requests


@pytest.mark.parametrize("policy", sorted({*composition_names()} - {"prefetch_dial"}))
def test_a_request_that_starts_afresh_is_as_if_alone(policy, traces, subjects):
    """Lifecycle `request`: the third request takes the same time without the others before it.

    (The dial draws its luck by the number of the layer-step, so it is left out.)
    """
    together = run(subjects, policy).forward_ns[subjects[0].steps.request == 2]
    alone = (PreparedTrace.of(select_requests(traces[0], [2])), subjects[1])
    assert run(alone, policy).forward_ns.tolist() == together.tolist()


@pytest.mark.parametrize("policy", ["inter_iteration", "oled", "moe_infinity", "promoe", "lfu"])
def test_one_request_is_the_same_in_both_lifecycles(policy, traces, subjects):
    alone = (PreparedTrace.of(select_requests(traces[0], [1])), subjects[1])
    afresh, on = (run(alone, policy, lifecycle=kind) for kind in ("request", "persistent"))
    changed = {"wall_s", "provenance"}
    for name in set(afresh.metrics) - changed:
        assert afresh.metrics[name] == on.metrics[name], name


def test_a_persistent_cache_begins_a_request_with_the_last_one_s_residents(subjects):
    afresh, on = (run(subjects, "lru", lifecycle=kind) for kind in ("request", "persistent"))
    assert afresh.metrics["hits"] < on.metrics["hits"]


# ---- batches


@pytest.mark.parametrize("policy", ["inter_iteration", "oled", "hybrimoe"])
def test_batches_keep_tokens_and_merge_the_rest(policy, subjects):
    alone = run(subjects, policy, slots=16).metrics
    for rows in (2, 3, 4, 9):
        merged = run(subjects, policy, slots=16, batch_size=rows).metrics
        assert merged["layer_steps"] < alone["layer_steps"]
        assert merged["accesses"] < alone["accesses"]
        tokens = [simulate_tokens(subjects, n) for n in (1, rows)]
        assert tokens[0] == tokens[1]
        assert merged["throughput_tokens_per_s"] > alone["throughput_tokens_per_s"]
    assert merged == {**run(subjects, policy, slots=16, batch_size=4).metrics} | {
        "wall_s": merged["wall_s"],
        "provenance": merged["provenance"],
    }  # nine rows are four: there are no more requests


def simulate_tokens(subjects, rows: int) -> tuple[int, int]:
    """(token, expert) pairs and produced tokens of a batched replay."""
    steps = subjects[0].batched(rows).steps
    return int(steps.count.sum()), int(steps.produced.sum())


def test_a_batch_of_one_is_no_batch(subjects):
    plain, one = (run(subjects, "oled", **f).metrics for f in ({}, {"batch_size": 1}))
    assert without_wall(plain) == without_wall(one)


def test_tpot_of_a_batch_is_the_time_per_token_of_one_row(subjects):
    """Four requests in lockstep: time of the decoding forwards, over a quarter of the tokens."""
    result = run(subjects, "inter_iteration", batch_size=4)
    steps = subjects[0].batched(4).steps
    decoding = np.isin(steps.phase, DECODING)
    expected = result.forward_ns[decoding].sum() / (steps.produced.sum() / 4)
    assert result.metrics["tpot_ns"] == pytest.approx(expected)


# ---- prefill apart


@pytest.mark.parametrize("prefill", ["stream", "bypass"])
def test_a_prefill_kept_from_the_policy_leaves_residents_alone(prefill, subjects):
    policy = {
        "name": "test",
        "description": "",
        "retention": {"_target_": "oled.policies.retention.lfu.Lfu"},
        "admission": "demand",
        "prefill": prefill,
    }
    found = run(subjects, policy).metrics["phases"]
    assert found["prefill"]["hits"] == 0
    assert found["prefill"]["transfers"] == found["prefill"]["accesses"]
    whole = run(subjects, {**policy, "prefill": "policy"}).metrics["phases"]
    assert found["denoise"]["hits"] < whole["denoise"]["hits"]  # nothing resident at its start


def test_scores_learn_from_a_streamed_prefill_and_not_from_a_bypassed_one(subjects):
    policy = {
        "name": "test",
        "description": "",
        "retention": {"_target_": "oled.policies.retention.lfu.Lfu"},
        "admission": "demand",
    }
    scores = [
        run(subjects, {**policy, "prefill": prefill}).replay.cache.score.sum()
        for prefill in ("policy", "stream", "bypass")
    ]
    assert scores[0] == scores[1] > scores[2]


# ---- timeline


def test_the_timeline_opens_and_names_its_lanes(subjects, tmp_path):
    result = run(subjects, "promoe", timeline=(0, 6))
    files = [result.timeline.write(tmp_path / name) for name in ("a.json.gz", "b.json.gz")]
    assert files[0].read_bytes() == files[1].read_bytes()
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"GPU compute", "H2D link", "CPU workers", "D2H link", "policy"}
    assert {e["ph"] for e in events} == {"M", "X", "C", "s", "f"}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert "L0" not in event["name"]  # absolute layer ids: MoE layers are 1 to 3
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[k] <= ends[k] for k in starts)


def test_a_window_is_a_part_of_the_whole(subjects):
    whole = run(subjects, "promoe", timeline=(0, 10**6)).timeline.entries
    window = run(subjects, "promoe", timeline=(5, 3)).timeline.entries
    inside = whole[(whole[:, 3] >= 5) & (whole[:, 3] < 8)]
    assert window.tolist() == inside.tolist()


def test_a_timeline_changes_nothing(subjects):
    with_it, without = (run(subjects, "oled", timeline=t).forward_ns for t in ((0, 99), None))
    assert with_it.tolist() == without.tolist()


@pytest.mark.parametrize("window", [(-1, 3), (10**6, 1), (0, 0)])
def test_a_window_outside_the_trace_is_refused(window, subjects):
    with pytest.raises(UserError, match=r"timeline window .* write \[first, number\]"):
        run(subjects, "lru", timeline=window)


# ---- G15 and rates by hand


def test_g15_layers_of_8_6_and_4_experts_of_different_sizes():
    """Slots, counts and bytes of each layer are its own; object hits and byte hits differ."""
    forwards = [Forward({0: {0: 1, 7: 1}, 1: {5: 1}, 2: {3: 1}}) for _ in range(3)]
    steps = make_steps(forwards, [8, 6, 4], top_k=2, expert_bytes=[100, 200, 400])
    outcome = replay(steps, compose("demand"), slots=1)
    layers = outcome.tally.by_layer
    assert layers[:, :3].tolist() == [[6, 2, 4], [3, 2, 1], [3, 2, 1]]  # accesses, hits, transfers
    found = count_metrics(outcome.tally.by_phase)
    assert found["hit_rate"] == 6 / 12
    assert found["hit_rate_bytes"] == (2 * 100 + 2 * 200 + 2 * 400) / (6 * 100 + 3 * 200 + 3 * 400)
    assert found["h2d_bytes"] == 4 * 100 + 200 + 400
    assert found["hit_rate_attainable"] == 6 / 9  # one slot a layer
    assert found["cache_utilization"] == 6 / 9


def test_effective_transfer_ratio_by_hand():
    """Forward 0 copies 0 and 1; forward 1 uses 1 of them and copies 2; forward 2 uses it: 2 of 3.

    What the last forward copies has no next forward and is not counted.
    """
    forwards = [Forward({0: {0: 1, 1: 1}}), Forward({0: {1: 1, 2: 1}}), Forward({0: {2: 1, 3: 1}})]
    steps = make_steps(forwards, [4], top_k=2)
    outcome = replay(steps, compose("demand"), slots=4)
    assert count_metrics(outcome.tally.by_phase)["effective_transfer_ratio"] == 2 / 3
