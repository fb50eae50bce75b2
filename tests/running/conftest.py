"""Small random models of every family that can be recorded, and a tokenizer of single bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DiffusionGemmaConfig,
    DiffusionGemmaTextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from oled import models as families
from oled.models.llada2 import LLaDA2MoeConfig
from oled.models.sdar import SDARMoeConfig
from oled.record import LoadedModel, overhead

EOS, MASK = 0, 1
VOCABULARY = 258
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large, so that routes and confidences differ from token to token
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "bos_token_id": None,
}
NARROW = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GROUPED = {**NARROW, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT = {
    **COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}

CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {  # of a number of layers
    "qwen3_moe": lambda layers=4: Qwen3MoeConfig(
        **COMMON,
        num_hidden_layers=layers,
        **NARROW,
        num_experts=8,
        head_dim=8,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "qwen2_moe": lambda layers=4: Qwen2MoeConfig(
        **COMMON,
        num_hidden_layers=layers,
        **NARROW,
        num_experts=8,
        shared_expert_intermediate_size=64,
    ),
    "olmoe": lambda layers=4: OlmoeConfig(
        **COMMON, num_hidden_layers=layers, num_experts=8, num_experts_per_tok=2
    ),
    "mixtral": lambda layers=4: MixtralConfig(
        **COMMON, num_hidden_layers=layers, num_local_experts=8, num_experts_per_tok=2
    ),
    "deepseek_v2": lambda layers=4: DeepseekV2Config(
        **LATENT,
        num_hidden_layers=layers,
        **NARROW,
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=1,
        topk_method="greedy",
    ),
    "deepseek_v3": lambda layers=4: DeepseekV3Config(
        **LATENT, num_hidden_layers=layers, **GROUPED, first_k_dense_replace=1
    ),
    "glm4_moe": lambda layers=4: Glm4MoeConfig(
        **COMMON, num_hidden_layers=layers, **GROUPED, head_dim=8, first_k_dense_replace=1
    ),
    "gpt_oss": lambda layers=4: GptOssConfig(
        **COMMON,
        num_hidden_layers=layers,
        num_local_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        sliding_window=6,
    ),
    "llada2_moe": lambda layers=4: LLaDA2MoeConfig(
        **COMMON,
        num_hidden_layers=layers,
        **NARROW,
        num_experts=8,
        n_group=4,
        topk_group=2,
        head_dim=8,
        mask_token_id=MASK,
    ),
    "sdar_moe": lambda layers=4: SDARMoeConfig(
        **COMMON,
        num_hidden_layers=layers,
        **NARROW,
        num_experts=8,
        head_dim=8,
        norm_topk_prob=True,
        block_length=8,
        mask_token_id=MASK,
    ),
    "diffusion_gemma": lambda layers=4: DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(
            **COMMON,
            num_hidden_layers=layers,
            num_experts=8,
            top_k_experts=2,
            moe_intermediate_size=16,
            head_dim=8,
            global_head_dim=16,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            sliding_window=6,
        ),
        vision_config=AutoConfig.for_model(
            "gemma4_vision",
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
        ),
        canvas_length=8,
        boi_token_id=255,
        eoi_token_id=256,
        image_token_id=257,
    ),
}

families.register()

torch.set_num_threads(1)  # the models are so small that more threads only wait for each other


def build(family: str, layers: int = 4) -> PreTrainedModel:
    """A random model of the family, always the same one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](layers)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("router.scale"):  # DiffusionGemma's begin as ones, too small to choose by
            torch.nn.init.uniform_(parameter, 10, 30)
        elif name.endswith("per_expert_scale"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(autouse=True)
def quick_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings measure their own cost on a few passes only."""
    monkeypatch.setattr(overhead, "MAX_PASSES", 4)


@pytest.fixture(params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture
def llada() -> PreTrainedModel:
    return build("llada2_moe")


@pytest.fixture
def qwen() -> PreTrainedModel:
    return build("qwen3_moe")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS, "<mask>": MASK}
    vocabulary |= {letter: index for index, letter in enumerate(alphabet, start=2)}
    bytes_only = Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<eos>", mask_token="<mask>"
    )


@pytest.fixture
def loaded(llada: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> LoadedModel:
    return LoadedModel("random", llada, tokenizer, torch.float16)
