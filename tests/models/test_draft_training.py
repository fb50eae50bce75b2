"""Training of draft experts: the terms by hand, and that they are learned on a frozen model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny_attention
import torch
from draft_distillation import (
    Distillation,
    Seen,
    Weights,
    logit_divergence,
    residual_error,
    router_divergence,
)
from tiny_data import Corpus
from tiny_recipe import Recipe as Shape
from tiny_recipe import initial_model
from train_draft_expert import Recipe, batch, train

RECIPE = Recipe(units=1, steps=12, windows=2, length=32, rate=1e-2)


def seen(routed: float, router: float, logits: list[float]) -> Seen:
    one = torch.full((1, 1), 1.0)
    return Seen([routed * one], [router * one], [torch.zeros(1, 1)], torch.tensor([logits]))


def test_terms_by_hand() -> None:
    """Scores 0.5 and 0.75; probabilities (1/2, 1/2) and (3/4, 1/4); 2 where the model adds 4."""
    teacher, student = seen(4.0, 0.0, [0.0, 0.0]), seen(2.0, math.log(3), [math.log(3), 0.0])
    assert residual_error(teacher, student).item() == pytest.approx(4 / 16)
    independent = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert router_divergence(teacher, student).item() == pytest.approx(independent, abs=1e-6)
    assert logit_divergence(teacher, student).item() == pytest.approx(independent, abs=1e-6)


def test_draft_experts_learn_and_the_model_stays() -> None:
    shape = replace(Shape(), vocab_size=64, num_experts=16, dense_width=32)
    model = initial_model(shape).eval().requires_grad_(False)
    model.set_attn_implementation(tiny_attention.NAME)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = np.random.default_rng(0)
    corpus = Corpus(rng.integers(2, 64, 640), np.arange(0, 641, 64))
    test = batch(corpus, RECIPE, 1000, 2)
    first = Distillation(model, None, RECIPE.block).loss(*test, Weights())
    experts = train(model, corpus, RECIPE)
    after = Distillation(model, experts, RECIPE.block).loss(*test, Weights())
    assert after < first
    assert experts.width == shape.expert_width
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
