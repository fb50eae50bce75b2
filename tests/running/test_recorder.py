"""The hooks: what they see is what the model used, and the model does not notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oled.errors import UserError
from oled.record import Recorder
from oled.running import families
from oled.running.families import read_family
from oled.running.modules import geometry_of, moe_layers
from oled.trace.schema import WeightKind

from .conftest import COMMON, CONFIGS, VOCABULARY, build

DENSE_FIRST = {"qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "llada2_moe"}
WEIGHTS = {
    "qwen3_moe": (WeightKind.SUM_ONE, None),
    "qwen2_moe": (WeightKind.UNNORMALISED, None),
    "olmoe": (WeightKind.UNNORMALISED, None),
    "mixtral": (WeightKind.SUM_ONE, None),
    "deepseek_v2": (WeightKind.UNNORMALISED, None),
    "deepseek_v3": (WeightKind.SCALED_SUM, 2.5),
    "glm4_moe": (WeightKind.SUM_ONE, None),
    "gpt_oss": (WeightKind.SOFTMAX_SELECTED, None),
    "llada2_moe": (WeightKind.SCALED_SUM, 2.5),
    "sdar_moe": (WeightKind.SUM_ONE, None),
    "diffusion_gemma": (WeightKind.UNNORMALISED, None),
}
SHAPE = (2, 12)
TOKENS = 24


@pytest.fixture
def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(2, VOCABULARY, SHAPE)


def run(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        if model.config.model_type == "diffusion_gemma":  # its forward is two passes
            return model.model.encoder(input_ids=ids).last_hidden_state
        return model(input_ids=ids).logits


def router_outputs(model: PreTrainedModel, ids: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """What each router returned, seen by plain hooks without a recorder."""
    seen: list[tuple[torch.Tensor, ...]] = []
    handles = [
        entry.modules[0].router.register_forward_hook(lambda _m, _i, output: seen.append(output))
        for entry in moe_layers(model)
    ]
    run(model, ids)
    for handle in handles:
        handle.remove()
    return seen


def test_routing_is_what_the_routers_returned(model: PreTrainedModel, ids: torch.Tensor) -> None:
    expected = router_outputs(model, ids)
    with Recorder(model) as recorder:
        run(model, ids)
        capture = recorder.take(TOKENS)
    dense = model.config.model_type in DENSE_FIRST
    assert capture.layers.tolist() == ([1, 2, 3] if dense else [0, 1, 2, 3])
    for row, (_, weights, experts) in enumerate(expected):
        assert np.array_equal(capture.expert_ids[row], experts.numpy())
        assert np.array_equal(capture.weights[row], weights.numpy())


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_output_and_model_are_unchanged(
    model: PreTrainedModel, ids: torch.Tensor, implementation: str
) -> None:
    model.set_experts_implementation(implementation)
    before, known = run(model, ids), set(ALL_EXPERTS_FUNCTIONS)
    with Recorder(model, score_width=3, horizons=2) as recorder:
        during = run(model, ids)
        recorder.take(TOKENS)
    assert torch.equal(before, during)
    assert torch.equal(before, run(model, ids))
    assert set(ALL_EXPERTS_FUNCTIONS) == known
    assert model.config._experts_implementation == implementation
    assert not any(module._forward_hooks for module in model.modules())


def test_weight_kind_is_the_familys_and_true(model: PreTrainedModel, ids: torch.Tensor) -> None:
    family = read_family(model.config)
    assert (family.weight_kind, family.weight_sum) == WEIGHTS[model.config.model_type]
    sums = np.stack([weights.sum(-1).numpy() for _, weights, _ in router_outputs(model, ids)])
    if family.expected_sum is None:
        assert np.ptp(sums) > 0.01
    else:
        assert np.allclose(sums, family.expected_sum, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "setting", "expected"),
    [
        ("olmoe", {"norm_topk_prob": True}, (WeightKind.SUM_ONE, None)),
        ("qwen3_moe", {"norm_topk_prob": False}, (WeightKind.UNNORMALISED, None)),
        ("deepseek_v3", {"norm_topk_prob": False}, (WeightKind.UNNORMALISED, None)),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}, (WeightKind.SUM_ONE, None)),
        ("deepseek_v2", {"norm_topk_prob": True}, (WeightKind.UNNORMALISED, None)),
    ],
)
def test_weight_kind_follows_the_configuration(
    family: str, setting: dict[str, float], expected: tuple[WeightKind, float | None]
) -> None:
    config = CONFIGS[family]()
    for key, value in setting.items():
        setattr(config, key, value)
    found = read_family(config)
    assert (found.weight_kind, found.weight_sum) == expected


def test_geometry_comes_from_the_weights(model: PreTrainedModel) -> None:
    geometry = geometry_of(model, torch.bfloat16)
    experts = moe_layers(model)[0].experts
    values = sum(p[0].numel() for p in experts.parameters(recurse=False))
    assert set(geometry.expert_bytes) == {2 * values}
    assert set(geometry.experts_per_layer) == {8}
    assert (geometry.top_k, geometry.hidden_size, geometry.num_layers) == (2, 32, 4)
    facts = model.config.get_text_config().to_dict()
    narrow = facts.get("moe_intermediate_size", COMMON["intermediate_size"])
    assert geometry.moe_intermediate_size == narrow
    assert geometry_of(model).expert_bytes[0] == 4 * values


def test_shared_experts_are_counted_in_routed_ones() -> None:
    assert read_family(build("qwen2_moe").config).shared_experts == 4
    assert read_family(build("deepseek_v2").config).shared_experts == 2
    assert read_family(build("mixtral").config).shared_experts == 0
    assert read_family(build("diffusion_gemma").config).shared_experts == 3  # a dense MLP beside


def test_scores_are_the_best_of_all_experts(model: PreTrainedModel, ids: torch.Tensor) -> None:
    outputs = router_outputs(model, ids)
    with Recorder(model, score_width=100) as recorder:
        run(model, ids)
        scores = recorder.take(TOKENS).scores(np.arange(5, 9))
    assert scores is not None
    sigmoid = "deepseek_v3", "glm4_moe", "llada2_moe"
    for row, (logits, _, _) in enumerate(outputs):
        values = logits[5:9].float()
        if model.config.model_type in sigmoid:
            values = values.sigmoid()
        elif model.config.model_type != "diffusion_gemma":  # its routers say probabilities
            values = values.softmax(-1)
        picked = np.take_along_axis(values.numpy(), scores.expert_ids[row].astype(int), -1)
        assert scores.expert_ids.shape == (len(outputs), 4, 8)
        assert np.allclose(scores.values[row], picked, atol=1e-6)
        assert (np.diff(scores.values[row]) <= 0).all()


def test_biased_scores_stand_beside_the_plain_ones(llada: PreTrainedModel) -> None:
    with torch.no_grad():
        for entry in moe_layers(llada):
            entry.modules[0].router.expert_bias.copy_(torch.linspace(-1, 1, 8))
    with Recorder(llada, score_width=8) as recorder:
        run(llada, torch.arange(2, 26)[None])
        scores = recorder.take(TOKENS).scores(np.arange(TOKENS))
    bias = np.linspace(-1, 1, 8, dtype=np.float32)
    assert np.allclose(scores.biased, scores.values + bias[scores.expert_ids], atol=1e-6)
    assert (np.diff(scores.biased) <= 0).all()


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_next_gates_are_asked_about_this_layers_input(family: str) -> None:
    model = build(family, layers=6)
    inputs: list[torch.Tensor] = []
    layers = moe_layers(model)
    hooks = [
        e.modules[0].router.register_forward_hook(lambda _m, i, _o: inputs.append(i[0]))
        for e in layers
    ]
    with Recorder(model, horizons=4) as recorder:
        run(model, torch.arange(2, 26)[None])
        said = recorder.take(TOKENS).predictions(np.arange(4, 10))
    for hook in hooks:
        hook.remove()
    place = {entry.layer: row for row, entry in enumerate(layers)}
    pairs = [(place[one.layer], place[one.target]) for one in said]
    count = len(layers)
    assert count >= 5  # so that there is something four layers ahead
    assert pairs == [(a, a + h) for a in range(count) for h in range(1, 5) if a + h < count]
    for one, (row, target) in zip(said, pairs, strict=True):
        with torch.inference_mode():
            _, weights, experts = layers[target].modules[0].router(inputs[row])
        total = np.zeros(8)
        tokens = slice(4, 10)
        np.add.at(total, experts[tokens].numpy(), weights[tokens].numpy())
        assert set(one.expert_ids) == set(experts[tokens].flatten().tolist())
        assert np.allclose(one.scores, total[one.expert_ids], atol=1e-5)
        assert (np.diff(one.scores) <= 0).all()


def test_weights_that_break_the_familys_promise_are_refused(ids: torch.Tensor) -> None:
    olmoe = build("olmoe")
    olmoe.config.norm_topk_prob = True  # its routers keep their own, false, setting
    with Recorder(olmoe) as recorder:
        run(olmoe, ids)
        with pytest.raises(UserError, match=r"layer 0, token 0: the weights add up to .*says 1"):
            recorder.take(TOKENS)


def test_an_unknown_family_claims_no_sum(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(families._RULES, "mixtral")
    mixtral = build("mixtral")
    family = read_family(mixtral.config)
    assert (family.weight_kind, family.scoring) == (WeightKind.UNNORMALISED, None)
    with Recorder(mixtral, horizons=1) as recorder:
        run(mixtral, ids)
        assert recorder.take(TOKENS).expert_ids.shape == (4, TOKENS, 2)
    with pytest.raises(UserError, match="mixtral"):
        Recorder(mixtral, score_width=4)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match="LlamaForCausalLM has no routed experts"):
        Recorder(LlamaForCausalLM(LlamaConfig(**COMMON)))


def test_recorders_may_be_nested(qwen: PreTrainedModel, ids: torch.Tensor) -> None:
    plain = run(qwen, ids)
    with Recorder(qwen) as outer, Recorder(qwen) as inner:
        assert torch.equal(run(qwen, ids), plain)
        ours, theirs = outer.take(TOKENS), inner.take(TOKENS)
    assert np.array_equal(ours.expert_ids, theirs.expert_ids)
    assert torch.equal(run(qwen, ids), plain)


def test_an_error_inside_gives_the_model_back(qwen: PreTrainedModel) -> None:
    known = set(ALL_EXPERTS_FUNCTIONS)
    with pytest.raises(ZeroDivisionError), Recorder(qwen, horizons=1):
        raise ZeroDivisionError
    assert set(ALL_EXPERTS_FUNCTIONS) == known
    assert qwen.config._experts_implementation == "grouped_mm"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_a_gpu_have_landed(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model, ids = model.cuda(), ids.cuda()
    before = run(model, ids)
    with Recorder(model, score_width=4, horizons=2) as recorder:
        for _ in range(20):
            assert torch.equal(run(model, ids), before)
            capture = recorder.take(TOKENS)
    for row, (_, weights, experts) in enumerate(router_outputs(model, ids)):
        assert np.array_equal(capture.expert_ids[row], experts.cpu().numpy())
        assert np.allclose(capture.weights[row], weights.cpu().numpy(), atol=1e-6)
