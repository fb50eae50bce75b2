"""The published checkpoint layout: loading, computing, saving, sharded and not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reference
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from oled.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM


def published_weights(config: LLaDA2MoeConfig) -> dict[str, Tensor]:
    """Random weights under the keys and shapes of LLaDA2.0-mini's files."""
    torch.manual_seed(1)
    h, d = config.hidden_size, config.head_dim
    n, g = config.num_attention_heads, config.num_key_value_heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape) / shape[-1] ** 0.5

    def mlp(prefix: str, width: int) -> dict[str, Tensor]:
        shapes = {"gate_proj": (width, h), "up_proj": (width, h), "down_proj": (h, width)}
        return {f"{prefix}.{name}.weight": random(*shape) for name, shape in shapes.items()}

    weights = {
        "model.word_embeddings.weight": random(config.vocab_size, h),
        "model.norm.weight": torch.rand(h) + 0.5,
        "lm_head.weight": random(config.vocab_size, h),
    }
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.attention.query_key_value.weight": random((n + 2 * g) * d, h),
            f"{layer}.attention.dense.weight": random(h, n * d),
            f"{layer}.attention.query_layernorm.weight": torch.rand(d) + 0.5,
            f"{layer}.attention.key_layernorm.weight": torch.rand(d) + 0.5,
            f"{layer}.input_layernorm.weight": torch.rand(h) + 0.5,
            f"{layer}.post_attention_layernorm.weight": torch.rand(h) + 0.5,
        }
        if index < config.first_k_dense_replace:
            weights |= mlp(f"{layer}.mlp", config.intermediate_size)
            continue
        width = config.moe_intermediate_size
        weights[f"{layer}.mlp.gate.weight"] = random(config.num_experts, h)
        weights[f"{layer}.mlp.gate.expert_bias"] = torch.randn(config.num_experts) / 5
        weights |= mlp(f"{layer}.mlp.shared_experts", width * config.num_shared_experts)
        for expert in range(config.num_experts):
            weights |= mlp(f"{layer}.mlp.experts.{expert}", width)
    return weights


def write_checkpoint(
    folder: Path, config: LLaDA2MoeConfig, weights: dict[str, Tensor], shards: int
) -> None:
    """The files as a publisher writes them: experts of a layer may lie in different shards."""
    config.architectures = ["LLaDA2MoeModelLM"]
    config.save_pretrained(folder)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    index = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[shard::shards])
        save_file(part, folder / name, {"format": "pt"})
        index |= dict.fromkeys(part, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.fixture
def weights(config: LLaDA2MoeConfig) -> dict[str, Tensor]:
    return published_weights(config)


@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip_of_the_published_layout(
    tmp_path: Path, config: LLaDA2MoeConfig, weights: dict[str, Tensor], shards: int
) -> None:
    write_checkpoint(tmp_path / "published", config, weights, shards)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "published", output_loading_info=True
    )
    assert isinstance(loaded, LLaDA2MoeModelLM)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]

    loaded.save_pretrained(tmp_path / "saved", max_shard_size="40KB" if shards > 1 else "1GB")
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    saved = {key: value for file in files for key, value in load_file(file).items()}
    assert (len(files) > 1) == (shards > 1)
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[key], value) for key, value in weights.items())

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.randint(config.vocab_size, (2, 8))
    assert torch.equal(again(ids).logits, loaded(ids).logits)


def test_loaded_model_computes_what_the_keys_say(
    tmp_path: Path, config: LLaDA2MoeConfig, weights: dict[str, Tensor]
) -> None:
    write_checkpoint(tmp_path, config, weights, shards=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = torch.randint(config.vocab_size, (12,))
    block = torch.arange(12) // 4
    visible = block[None] <= block[:, None]
    expected = reference.logits(ids, visible, weights, config)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        found = model(ids[None], attention_mask=visible[None, None]).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_half_precision_keeps_the_bias_in_fp32(
    tmp_path: Path, config: LLaDA2MoeConfig, weights: dict[str, Tensor]
) -> None:
    write_checkpoint(tmp_path, config, weights, shards=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    assert gate.weight.dtype == torch.bfloat16
    assert torch.equal(gate.expert_bias, weights["model.layers.1.mlp.gate.expert_bias"])


def test_published_configuration_is_understood(tmp_path: Path) -> None:
    """Keys of LLaDA2.0-mini's config.json as it is published, unused ones included."""
    published = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "rope_theta": 600000,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 64,
        "norm_head": False,
        "num_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_rmsnorm": True,
        "use_cache": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, LLaDA2MoeConfig)
    assert config.rope_parameters["rope_theta"] == 600_000
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
