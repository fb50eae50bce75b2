"""SDAR's mixture of experts: Qwen3-MoE under a model type of its own.

The published code differs from Qwen3-MoE in what attention may see, which decoding passes in, and
the checkpoints have Qwen3-MoE's layout. Importing this registers the family with the Auto classes,
so that checkpoints of type `sdar_moe` load without the code that comes with them.

Sources: lmdeploy and SGLang, which read the same checkpoints (mask id, block length).
"""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)


@strict(accept_kwargs=True)
class SDARMoeConfig(Qwen3MoeConfig):  # type: ignore[misc]
    """Qwen3-MoE's configuration, and what block diffusion needs; some checkpoints say `block_size`.

    The defaults of both are SDAR-30B-A3B-Chat's.
    """

    model_type = "sdar_moe"
    attribute_map: ClassVar[dict[str, str]] = {
        **Qwen3MoeConfig.attribute_map,
        "block_size": "block_length",
    }

    block_length: int = 4
    mask_token_id: int = 151669


class SDARMoeForCausalLM(Qwen3MoeForCausalLM):  # type: ignore[misc]
    """Qwen3-MoE; decode it with `BlockDiffusion`."""

    config_class = SDARMoeConfig

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Say yes, as Qwen3-MoE does: transformers looks for a decorator in this file's source."""
        return True


AutoConfig.register(SDARMoeConfig.model_type, SDARMoeConfig, exist_ok=True)
AutoModelForCausalLM.register(SDARMoeConfig, SDARMoeForCausalLM, exist_ok=True)
register_checkpoint_conversion_mapping(
    SDARMoeConfig.model_type,
    get_checkpoint_conversion_mapping(Qwen3MoeConfig.model_type),
    overwrite=True,
)
