"""Routes known by hand, through the hook: the named cases G01 and G02."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from oled.record import Recorder
from oled.running.capture import Capture
from oled.running.modules import moe_layers
from oled.trace.schema import WeightKind

from .conftest import CONFIGS


def one_layer(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with a single MoE layer, whose router's logits are the first of its inputs."""
    model = AutoModelForCausalLM.from_config(config).eval()
    (layer,) = moe_layers(model)
    with torch.no_grad():
        torch.nn.init.eye_(layer.modules[0].router.weight)
    return model


def routed(model: PreTrainedModel, logits: list[float]) -> Capture:
    hidden = torch.zeros(1, 1, model.config.hidden_size)
    hidden[0, 0, : len(logits)] = torch.tensor(logits)
    (layer,) = moe_layers(model)
    block = model.get_submodule(layer.name.rpartition(".")[0])
    with Recorder(model, score_width=len(logits)) as recorder, torch.inference_mode():
        block(hidden)
        return recorder.take(1)


def test_g01_selection_by_biased_groups_weights_without_bias() -> None:
    """Taken again from the logits it would be other experts; the weights add up to 2.5, not 1."""
    model = one_layer(CONFIGS["llada2_moe"](layers=2))
    bias = torch.tensor([-0.5, 0, 0.1, 0.1, 0, -0.3, 0.2, 0.2])
    moe_layers(model)[0].modules[0].router.expert_bias.copy_(bias)
    found = routed(model, [2, -1, 0.5, 0.4, -2, 1.8, 0.3, 0.2])
    applied = dict(zip(found.expert_ids[0, 0].tolist(), found.weights[0, 0].tolist(), strict=True))
    assert applied == pytest.approx({6: 1.2774, 7: 1.2226}, abs=1e-4)
    assert found.layers.tolist() == [1]
    scores = found.scores(np.array([0]))
    plain = dict(zip(scores.expert_ids[0, 0].tolist(), scores.values[0, 0].tolist(), strict=True))
    assert sorted(sorted(plain, key=plain.get)[-2:]) == [0, 5]
    with Recorder(model) as recorder:
        assert (recorder.family.weight_kind, recorder.family.expected_sum) == (
            WeightKind.SCALED_SUM,
            2.5,
        )


def test_g02_weights_that_are_not_normalised_stay_as_they_are() -> None:
    config = CONFIGS["olmoe"](layers=1)
    config.num_experts = 4
    found = routed(one_layer(config), [1, 0, 0, 0])
    assert found.expert_ids[0, 0, 0] == 0
    assert found.weights[0, 0].tolist() == pytest.approx([0.4754, 0.1749], abs=1e-4)
