"""Tiny configurations of every family with routed experts in the installed transformers.

A configuration of a family's own defaults, with every size that it knows made small.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oled.errors import UserError
from oled.running.loading import quiet, refuse_unrecordable

_SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large, so that routes differ from token to token
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size_per_layer_input": 258,
    "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {"num_key_value_heads": 4}  # as many heads for keys as for queries
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8}
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0},
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
    },
    "dots3_note_text": {"shared_experts_intermediate_size": 16},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "dots1": {"n_shared_experts": 1},
    "gemma4_text": {
        "enable_moe_block": True,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "per_layer_config": {},
        "global_head_dim": 8,
    },
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "q_lora_rank": None,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
    "inkling2_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "unpadded_vocab_size": 258,
        "rel_extent": 64,
    },
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "unpadded_vocab_size": 258,
        "rel_extent": 64,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 1,
        "hc_lowrank": 8,
        "ple_embed_dim": 8,
    },
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
}


def families() -> tuple[str, ...]:
    """Return the model types for text whose code in transformers has experts, in order."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise RuntimeError("transformers is not installed")
    root = Path(spec.origin).parent / "models"
    found: dict[object, str] = {}  # by class: several types may name one, text alone the last
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        module = model_type_to_module_name(kind)
        file = root / module / f"modeling_{module}.py"
        if file.is_file() and re.search(r"^class \w*Experts\w*\(", file.read_text(), re.MULTILINE):
            found[name] = max(kind, found.get(name, ""))
    return tuple(sorted(found.values()))


def tiny_config(kind: str) -> PreTrainedConfig:
    """Return a small configuration of a model type."""
    whole = AutoConfig.for_model(kind)
    text = whole.get_text_config()
    known = text.to_dict()
    sizes = {key: value for key, value in _SIZES.items() if key in known}
    if "kv_lora_rank" in known:
        sizes |= _LATENT
    sizes |= _OWN.get(text.model_type, {})
    if text is whole:
        return AutoConfig.for_model(kind, **sizes)
    return AutoConfig.for_model(kind, text_config={**sizes, "model_type": text.model_type})


def refusal(kind: str) -> str | None:
    """Return why a model of this type is refused before its weights load; None: it is recorded."""
    try:
        with quiet():
            refuse_unrecordable(kind, tiny_config(kind), trust_remote_code=False)
    except UserError as error:
        return str(error)
    return None
