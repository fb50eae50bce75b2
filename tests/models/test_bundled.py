"""The checkpoint in the package, as it is shipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_attention
import torch
from safetensors import safe_open
from tiny_data import Corpus
from tiny_objective import held_out
from tiny_recipe import Recipe, initial_model, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import oled.models
from oled.models.catalogue import model_geometry
from oled.models.llada2 import LLaDA2MoeModelLM
from oled.paths import model_path
from oled.running.loading import load_model

TEXTS = [
    "Question: A baker fills 12 boxes with 6 buns each and sells 50 of the buns. How many buns are "
    "left?\nAnswer: The baker fills 12*6=<<12*6=72>>72 buns into boxes.\nAfter selling 50 there "
    "are 72-50=<<72-50=22>>22 buns left.\n#### 22",
    "Question: Lena reads 15 pages on Monday and twice as many pages on Tuesday. How many pages "
    "does she read in all?\nAnswer: On Tuesday she reads 15*2=<<15*2=30>>30 pages.\nIn all she "
    "reads 15+30=<<15+30=45>>45 pages.\n#### 45",
]


@pytest.fixture(scope="module")
def bundled() -> tuple[LLaDA2MoeModelLM, PreTrainedTokenizerFast]:
    loaded = load_model("tiny")
    return loaded.model, loaded.tokenizer


def test_files_are_small_and_in_the_published_layout() -> None:
    files = {file.name: file.stat().st_size for file in model_path().iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert sum(files.values()) <= 24e6
    with safe_open(model_path() / "model.safetensors", "pt") as weights:
        keys = set(weights.keys())
        assert "model.layers.4.mlp.experts.127.down_proj.weight" in keys
        assert "lm_head.weight" not in keys  # tied
        assert not [key for key in keys if "gate_up_proj" in key]
        assert weights.get_tensor("model.layers.1.mlp.experts.0.up_proj.weight").dtype == (
            torch.float16
        )


def test_loads_by_name_and_by_path_ready_to_compute(
    bundled: tuple[LLaDA2MoeModelLM, PreTrainedTokenizerFast],
) -> None:
    model, tokenizer = bundled
    assert model.dtype == torch.float32
    assert not model.training
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    oled.models.register()
    assert isinstance(AutoModelForCausalLM.from_pretrained(model_path()), LLaDA2MoeModelLM)
    auto = AutoTokenizer.from_pretrained(model_path())
    assert auto(TEXTS[0])["input_ids"] == tokenizer(TEXTS[0])["input_ids"]


def test_tokenizer_and_model_agree_on_special_tokens(
    bundled: tuple[LLaDA2MoeModelLM, PreTrainedTokenizerFast],
) -> None:
    model, tokenizer = bundled
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.mask_token_id == model.config.mask_token_id
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.config.eos_token_id
    assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == TEXTS[0]


def test_catalogue_entry_is_this_model(
    bundled: tuple[LLaDA2MoeModelLM, PreTrainedTokenizerFast],
) -> None:
    model, _ = bundled
    shape, config = model_geometry("tiny"), model.config
    assert shape.num_layers == config.num_hidden_layers
    assert shape.dense_layers == config.first_k_dense_replace
    assert shape.hidden_size == config.hidden_size
    assert shape.dense_intermediate_size == config.intermediate_size
    assert shape.num_experts == config.num_experts
    assert shape.top_k == config.num_experts_per_tok
    assert shape.vocab_size == config.vocab_size
    assert shape.block_length == config.block_length
    assert shape.mask_id == config.mask_token_id
    experts = model.model.layers[1].mlp.experts
    assert shape.expert_params == sum(p.numel() for p in experts.parameters()) / shape.num_experts
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert shape.total_params == sum(p.numel() for p in model.parameters()) - norms


def test_configuration_is_the_training_scripts(
    bundled: tuple[LLaDA2MoeModelLM, PreTrainedTokenizerFast],
) -> None:
    model, _ = bundled
    made, shipped = tiny_config(Recipe()).to_dict(), model.config.to_dict()
    for unrelated in ("_name_or_path", "architectures", "dtype", "transformers_version"):
        made.pop(unrelated), shipped.pop(unrelated)
    assert shipped == made


@torch.no_grad()
def test_it_was_trained_and_the_control_was_not(
    bundled: tuple[LLaDA2MoeModelLM, PreTrainedTokenizerFast],
) -> None:
    """On text that is nobody's training data: nats a token, both block lengths."""
    _, tokenizer = bundled
    model = load_model("tiny").model  # not the others': its attention is changed
    corpus = Corpus.encode(TEXTS * 2, tokenizer)
    control = initial_model(Recipe()).eval()
    recipe = replace(Recipe(), length=64)
    for network, low, high in ((model, 0.0, 4.5), (control, 6.5, 9.0)):
        network.set_attn_implementation(tiny_attention.NAME)
        losses = held_out(network, corpus, recipe, windows=2)
        assert all(low < loss < high for loss in losses.values())
