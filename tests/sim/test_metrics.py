"""What a metric counts: decoding forwards, ratios at most 1, oracles that begin alike; by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from oled import simulate
from oled.errors import UserError
from oled.policies.composition import load_composition
from oled.policies.retention.belady import BeladyFromTheStart
from oled.sim.metrics import headline, prefill_ns, tpot_ns, ttft_ns
from oled.sim.prepared import PreparedTrace
from oled.trace.schema import Phase
from oled.trace.steps import known_confidences
from oled.trace.synthetic import LAYERED, Workload, synthetic_trace

from .build import Forward, compose, make_steps, replay
from .test_product import GEOMETRY

LOAD = Workload(requests=3, prompt_blocks=2, blocks=2, block_length=8, horizons=2, scores=16)
RATIOS = ("hit_rate", "hit_rate_tokens", "hit_rate_bytes", "hit_rate_attainable",
          "cache_utilization", "busy_gpu", "busy_h2d", "busy_d2h", "busy_cpu",
          "effective_transfer_ratio", "dropped_gate_share")  # fmt: skip


@pytest.fixture(scope="module")
def subjects():
    return tuple(
        PreparedTrace.of(synthetic_trace(GEOMETRY, LOAD, LAYERED, seed=seed)) for seed in (1, 2)
    )


def phased(forwards, phases, accepted):
    """One layer of 4 experts; what `make_steps` leaves open is put in."""
    steps = make_steps(forwards, [4], top_k=2)
    return dataclasses.replace(steps, phase=np.array(phases), accepted=np.array(accepted))


def test_hit_rate_is_of_decoding_forwards_by_hand():
    """Two slots. Prefill misses 0 and 1; decoding hits both, then hits 1 and misses 2."""
    steps = phased(
        [Forward({0: {0: 1, 1: 1}}), Forward({0: {0: 1, 1: 1}}), Forward({0: {1: 1, 2: 1}})],
        [Phase.PREFILL, Phase.DENOISE, Phase.DENOISE],
        [0, 0, 2],
    )
    found = headline(replay(steps, compose("demand"), slots=2).tally.by_phase)
    assert (found["hits"], found["accesses"], found["hit_rate"]) == (3, 4, 3 / 4)
    assert (found["hits_all"], found["accesses_all"], found["hit_rate_all"]) == (3, 6, 3 / 6)
    assert (found["transfers"], found["transfers_all"]) == (1, 3)
    assert (found["forwards"], found["forwards_all"]) == (2, 3)
    assert found["hit_rate_attainable"] == found["cache_utilization"] == 3 / 4


def test_first_tokens_and_prefill_by_hand():
    """Prefill takes 5, two denoising steps 2 and 3; only the second accepts tokens."""
    steps = phased(
        [Forward({0: {0: 1}}) for _ in range(3)],
        [Phase.PREFILL, Phase.DENOISE, Phase.DENOISE],
        [0, 0, 2],
    )
    took = np.array([5, 2, 3])
    assert prefill_ns(took, steps) == 5
    assert ttft_ns(took, steps) == 10
    assert tpot_ns(took, dataclasses.replace(steps, produced=np.array([0, 0, 2])), {0: 1}) == 5 / 2
    nothing = dataclasses.replace(steps, accepted=np.zeros(3, np.int64))
    assert ttft_ns(took, nothing) is None


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(
    ("policy", "slots"),
    [("hybrimoe", 4), ("prefetch_dial", 3), ("oled_fill", 3), ("lru", 3), ("oracle_pooled", 2)],
)
def test_ratios_lie_between_0_and_1(policy, slots, scope, subjects):
    """Prefetchers hit in staging, pooled policies give a layer more than its even share."""
    if scope == "global":
        slots *= 3
    found = simulate(
        subjects[0], policy, calibration=subjects[1], slots=slots, scope=scope, references=False
    ).metrics
    for name in RATIOS:
        for key in (name, f"{name}_all"):
            assert found[key] is None or 0 <= found[key] <= 1, key


@pytest.mark.parametrize("policy", ["fiddler", "fiddler_artefact", "cpu_all", "static_popularity"])
def test_no_demand_policy_has_more_hits_than_belady_with_its_residents(policy, subjects):
    for slots in (3, 8, 15):
        found = simulate(subjects[0], policy, calibration=subjects[1], slots=slots)
        oracle = dataclasses.replace(
            load_composition("oracle"),
            initial=load_composition(policy).initial,
            retention=BeladyFromTheStart(),
        )
        best = simulate(
            subjects[0], oracle, calibration=subjects[1], slots=slots, references=False
        ).metrics
        assert best["hits_all"] >= found.metrics["hits_all"]
        assert found.metrics["ref_belady_uniform_hit_rate"] == best["hit_rate"]


def test_belady_knows_when_its_first_residents_are_used():
    """One slot, resident 3 (the last id): it is used in forward 2, expert 0 in forward 1 only once;
    to keep 3 and bypass 0 gives a hit, to replace it none."""
    forwards = [Forward({0: {0: 1}}), Forward({0: {3: 1}}), Forward({0: {3: 1}})]
    steps = make_steps(forwards, [4], top_k=1)
    oracle = dataclasses.replace(compose("compete"), initial="last", retention=BeladyFromTheStart())
    assert headline(replay(steps, oracle, slots=1).tally.by_phase)["hits_all"] == 2


def test_popularity_over_all_layers_gives_layers_unequal_slots(subjects):
    result = simulate(
        subjects[0], "fiddler_artefact", calibration=subjects[1], slots=4, references=False
    )
    held = result.replay.cache.resident.sum(axis=1)
    assert held.sum() == 4 * 3
    prior = result.replay.cache.prior
    kept = prior[result.replay.cache.resident != 0]
    assert kept.min() >= np.sort(prior, axis=None)[-12]


def test_released_code_names_its_own_costs(subjects):
    tide = simulate(subjects[0], "tide_artefact", slots=5, references=False)
    said = tide.metrics["provenance"]
    assert said["settings"]["cpu_kernel"] == "torch"
    assert said["settings"]["pinned"] is False
    assert said["runtime"] == "expert_loop"
    assert "as released: runtime=expert_loop" in said["labels"]


def test_policies_that_drop_work_say_that_the_bound_is_none(subjects):
    said = simulate(subjects[0], "lru", slots=5, references=False).metrics["provenance"]["labels"]
    assert not any("bound_relaxed" in label for label in said)


def test_a_forward_knows_the_confidences_of_the_one_before(subjects):
    """Of the same position of the same request; 1 (unknown) where there was none."""
    trace = subjects[0].read()
    known = known_confidences(trace)
    offsets = trace.forwards.token_offsets
    seen = {}
    for forward in range(trace.num_forwards):
        for token in range(offsets[forward], offsets[forward + 1]):
            place = trace.forwards.request[forward], trace.tokens.position[token]
            expected = seen.get(place, np.nan)
            assert known[token] == expected or (np.isnan(expected) and np.isnan(known[token]))
            seen[place] = trace.tokens.confidence[token]
    subject = subjects[0]
    assert not np.array_equal(subject.steps.mass, subject.knowing_its_own().steps.mass)
    before = simulate(subject, "oled_priority", slots=4, references=False)
    assert before.metrics["provenance"]["settings"]["confidence"] == "previous"
    with pytest.raises(UserError, match="confidence is 'mine'; it must be 'previous' or 'own'"):
        simulate(subjects[0], "lru", slots=4, confidence="mine")
