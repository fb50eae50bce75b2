"""The grouped sigmoid router against transformers' own, and the golden cases G01 and G02."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, OlmoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

from oled.models.llada2 import LLaDA2MoeConfig, LLaDA2TopKRouter


def identity_router(experts: int, **settings: object) -> LLaDA2TopKRouter:
    """A router whose logits are its input."""
    router = LLaDA2TopKRouter(LLaDA2MoeConfig(hidden_size=experts, num_experts=experts, **settings))
    torch.nn.init.eye_(router.weight)
    return router


@pytest.mark.parametrize(
    ("experts", "k", "groups", "kept", "normalised"),
    [(256, 8, 8, 4, True), (128, 4, 8, 4, True), (32, 6, 4, 2, False), (16, 4, 1, 1, True)],
)
def test_equal_to_the_deepseek_v3_router(
    experts: int, k: int, groups: int, kept: int, normalised: bool
) -> None:
    torch.manual_seed(experts)
    shared = {
        "hidden_size": 64,
        "num_experts_per_tok": k,
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": normalised,
        "routed_scaling_factor": 2.5,
    }
    ours = LLaDA2TopKRouter(LLaDA2MoeConfig(num_experts=experts, **shared))
    theirs = DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=experts, **shared))
    weight, bias = torch.randn(experts, 64) / 8, torch.randn(experts) / 4
    ours.load_state_dict({"weight": weight, "expert_bias": bias})
    theirs.load_state_dict({"weight": weight, "e_score_correction_bias": bias})
    hidden = torch.randn(500, 64)

    logits, weights, ids = ours(hidden)
    their_logits, their_weights, their_ids = theirs(hidden)

    order, their_order = ids.argsort(1), their_ids.argsort(1)
    assert torch.equal(logits, their_logits)
    assert torch.equal(ids.gather(1, order), their_ids.gather(1, their_order))
    torch.testing.assert_close(
        weights.gather(1, order), their_weights.gather(1, their_order), atol=1e-6, rtol=0
    )


def test_g01_selection_by_biased_groups_weights_without_bias() -> None:
    router = identity_router(8, n_group=4, topk_group=2, num_experts_per_tok=2)
    router.expert_bias.copy_(torch.tensor([-0.5, 0, 0.1, 0.1, 0, -0.3, 0.2, 0.2]))
    logits = torch.tensor([[2, -1, 0.5, 0.4, -2, 1.8, 0.3, 0.2]])

    returned, weights, ids = router(logits)

    applied = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert applied == pytest.approx({6: 1.2774, 7: 1.2226}, abs=1e-4)
    assert weights.sum().item() == pytest.approx(2.5)
    assert torch.equal(returned, logits)


def test_g02_weights_that_are_not_normalised_stay_as_they_are() -> None:
    logits = torch.tensor([[1.0, 0, 0, 0]])
    config = OlmoeConfig(hidden_size=4, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False)
    softmax = OlmoeTopKRouter(config)
    torch.nn.init.eye_(softmax.weight)
    sigmoid = identity_router(
        4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )

    assert softmax(logits)[1][0].tolist() == pytest.approx([0.4754, 0.1749], abs=1e-4)
    assert sigmoid(logits)[1][0].tolist() == pytest.approx([0.7311, 0.5], abs=1e-4)


def test_scores_are_fp32_in_a_half_precision_model() -> None:
    router = identity_router(8, n_group=4, topk_group=2, num_experts_per_tok=2).to(torch.bfloat16)
    router.expert_bias = router.expert_bias.float()
    logits, weights, _ = router(torch.randn(3, 8, dtype=torch.bfloat16))
    assert logits.dtype == weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_function": "softmax"}, "sigmoid"),
        ({"num_experts": 250}, "8 groups"),
        ({"num_experts": 16, "topk_group": 2}, "leaves 4 experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
    ],
)
def test_configurations_that_cannot_work_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLaDA2MoeConfig(**settings)
