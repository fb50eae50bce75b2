"""Trained predictors asked while a model decodes: what they say, and what policies make of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from oled.errors import UserError
from oled.live.gates import predictor_for
from oled.policies.composition import load_composition
from oled.record import BlockDiffusion, LoadedModel, load_model, record
from oled.running.modules import moe_layers
from oled.running.predictors import FUTURE_ROUTER, SPICE
from oled.trace import build_steps, load
from oled.trace.steps import coming_scores
from tests.live import test_run as runs
from tests.live.build import RESIDENT
from tests.live.test_run import PROMPTS, difference
from tests.running.conftest import build
from tests.running.test_predictors import heads_file

BLOCKS = BlockDiffusion(block_length=16, max_new_tokens=32, threshold=0.9)
EXACT = ("temporal_router", "spatio_temporal_router", "spice_exact")


def decode(tiny, policy, slots, **more):
    """One prompt: the run and the logits of all its forwards."""
    return runs.decode(tiny, policy, slots, BLOCKS, PROMPTS[:1], **more)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="module")
def reference(tiny):
    return decode(tiny, RESIDENT, 128)[1]


@pytest.mark.parametrize("policy", EXACT)
def test_the_same_logits_and_the_simulators_decisions(tiny, reference, policy):
    run, logits = decode(tiny, policy, 20, heads="bundled")
    assert logits == reference
    assert difference(run, policy, 20) is None
    layers = run.steps.num_layers
    assert run.steps.horizons == (layers - 1 if policy == "spice_exact" else layers)
    assert (len(run.link) > 0) == (policy != "temporal_router")
    assert (run.ask_ns > 0).all()
    assert run.summary()["ask_ns_per_forward"] > 0


def test_another_prediction_would_be_another_decision(tiny):
    """What was heard decides: with the heads' words taken away the simulator parts from the run."""
    run, _ = decode(tiny, "temporal_router", 20, heads="bundled")
    score = run.steps.pred_score
    silent = dataclasses.replace(run.steps, pred_score=np.zeros_like(score))
    assert difference(dataclasses.replace(run, steps=silent), "temporal_router", 20) is not None


@pytest.mark.parametrize(("policy", "predictor"), [(EXACT[1], FUTURE_ROUTER), (EXACT[2], SPICE)])
def test_what_is_said_live_is_what_a_recording_has(tiny, tmp_path, policy, predictor):
    run, _ = decode(tiny, policy, 20, heads="bundled")
    record(tiny, PROMPTS[:1], BLOCKS, tmp_path / "t", heads="bundled", score_width=128)
    told = build_steps(load(tmp_path / "t"), predictor=predictor)
    assert told.horizons == run.steps.horizons
    np.testing.assert_array_equal(told.expert, run.steps.expert)
    np.testing.assert_array_equal(told.pred_offsets, run.steps.pred_offsets)
    np.testing.assert_allclose(told.pred_score, run.steps.pred_score, atol=1e-4)
    np.testing.assert_allclose(coming_scores(told), coming_scores(run.steps), atol=1e-5)


def test_the_live_step_is_shown_what_the_simulator_shows(tiny):
    """`coming` of each layer-step, bitwise."""
    seen = []
    composition = load_composition("temporal_router")
    observe = composition.retention.observe

    class Watching(type(composition.retention)):
        def observe(self, step, cache, memory, params):
            seen.append(step.coming.copy())
            observe.function(step, cache, memory, params)

    watching = dataclasses.replace(composition, retention=Watching())
    run, _ = decode(tiny, watching, 20, heads="bundled")
    shown = coming_scores(run.steps)
    assert np.array_equal(np.stack(seen), shown)
    assert (shown > 0).any(axis=1).all()


def test_heads_must_be_given_and_fit(tiny, tmp_path):
    with pytest.raises(UserError, match="follows a trained predictor: give heads=FILE"):
        decode(tiny, "spice_exact", 20)
    other = heads_file(build("qwen3_moe"), tmp_path / "heads.safetensors")
    with pytest.raises(UserError, match="trained for another model"):
        decode(tiny, "spice_exact", 20, heads=other)
    unknown = dataclasses.replace(load_composition("temporal_router"), predictor="oracle")
    with pytest.raises(UserError, match="no predictor 'oracle', only future_router, spice"):
        predictor_for(unknown, tiny.model, moe_layers(tiny.model), "bundled", "cpu")
