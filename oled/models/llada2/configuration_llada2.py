"""Configuration of LLaDA2 MoE models, with the field names of the published checkpoints."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict(accept_kwargs=True)
class LLaDA2MoeConfig(PreTrainedConfig):  # type: ignore[misc]
    """Shape of a LLaDA2 model; the defaults are those of LLaDA2.0-mini (16 B, 256 experts, top-8).

    The first `first_k_dense_replace` layers are dense, the others hold `num_experts` routed experts
    and `num_shared_experts` shared ones. `block_length` is the length that decoding uses unless
    told otherwise; the weights themselves know no block length.
    """

    model_type = "llada2_moe"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    moe_intermediate_size: int = 512
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = False
    use_bias: bool = False
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    attention_dropout: float | int = 0.0
    tie_word_embeddings: bool = False

    rope_theta: float | int = 600_000.0
    partial_rotary_factor: float | int = 0.5
    rope_parameters: dict[str, Any] | None = None

    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 2.5
    score_function: str = "sigmoid"
    output_router_logits: bool = False

    block_length: int = 32
    mask_token_id: int = 156895
    pad_token_id: int | None = 156892
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 156892

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.score_function != "sigmoid":
            raise ValueError(f"LLaDA2 routers score with 'sigmoid', not {self.score_function!r}")
        if self.num_experts % self.n_group:
            raise ValueError(f"{self.num_experts} experts do not split into {self.n_group} groups")
        reachable = self.num_experts // self.n_group * self.topk_group
        if not self.num_experts_per_tok <= reachable <= self.num_experts:
            raise ValueError(
                f"topk_group={self.topk_group} of n_group={self.n_group} leaves {reachable} "
                f"experts for num_experts_per_tok={self.num_experts_per_tok}"
            )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type != "default":
            raise ValueError(f"LLaDA2 uses the plain rotary embedding, not rope_type={rope_type!r}")
