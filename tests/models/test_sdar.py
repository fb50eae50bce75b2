"""SDAR's checkpoints: their model type, layout and keys, without the code that comes with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from oled import models
from oled.models.sdar import SDARMoeConfig, SDARMoeForCausalLM

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
}
PUBLISHED = {
    "model_type": "sdar_moe",
    "architectures": ["SDARMoeForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar_moe.SDARMoeConfig",
        "AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM",
    },
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Qwen3MoeForCausalLM]:
    """Qwen3-MoE's files under SDAR's type, and the model that they are of."""
    models.register()
    torch.manual_seed(0)
    plain = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE)).eval()
    plain.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **PUBLISHED, "block_size": 16}))
    return tmp_path, plain


def test_a_checkpoint_loads_as_qwen3_moe(checkpoint: tuple[Path, Qwen3MoeForCausalLM]) -> None:
    folder, plain = checkpoint
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in load_file(
        folder / "model.safetensors"
    )
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is SDARMoeForCausalLM
    assert not any(found.values())
    tokens = torch.arange(2, 26)[None]
    with torch.inference_mode():
        assert torch.equal(model.eval()(tokens).logits, plain(tokens).logits)


def test_block_length_and_mask_are_the_checkpoints(
    checkpoint: tuple[Path, Qwen3MoeForCausalLM],
) -> None:
    config = AutoConfig.from_pretrained(checkpoint[0])
    assert (config.block_length, config.mask_token_id) == (16, 151669)
    assert SDARMoeConfig(**SHAPE).block_length == 4
    assert SDARMoeConfig(**SHAPE, block_length=32, mask_token_id=5).mask_token_id == 5


def test_saving_keeps_type_and_layout(
    checkpoint: tuple[Path, Qwen3MoeForCausalLM], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(checkpoint[0]).save_pretrained(tmp_path / "again")
    ours = load_file(tmp_path / "again" / "model.safetensors")
    theirs = load_file(checkpoint[0] / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "sdar_moe"
