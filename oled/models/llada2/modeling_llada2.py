"""LLaDA2 MoE for transformers 5: a block-diffusion language model with routed experts.

Shapes use: b batch, q positions of this forward, s positions visible (cached + q), h hidden size,
n query heads, g key/value heads, d head size, T = b·q tokens, E experts, k experts a token,
i expert width. Module names are those of the published checkpoints; only the experts differ: they
are one module with 3-D weights, so that transformers (and `oled.record`, `oled.live`) can dispatch
them through `ALL_EXPERTS_FUNCTIONS`. The mapping between both layouts is in `conversion`.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_llada2 import LLaDA2Attention, LLaDA2RMSNorm, additive_mask, rotary_tables
from .configuration_llada2 import LLaDA2MoeConfig


class LLaDA2MLP(nn.Module):
    """SwiGLU feed-forward: the dense first layers and the shared experts."""

    def __init__(self, config: LLaDA2MoeConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.use_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


class LLaDA2TopKRouter(nn.Module):
    """Grouped sigmoid router. The bias selects; the applied weight is the score without it.

    A token keeps the `topk_group` groups with the largest sums of their two best biased scores and
    takes its k experts from them. Scores are fp32 whatever the dtype of the model.
    """

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.expert_bias = nn.Buffer(torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map hidden [T, h] -> logits [T, E], applied weights [T, k], expert ids [T, k]."""
        logits = F.linear(hidden.float(), self.weight.float())
        scores = logits.sigmoid()
        ids = self.select(scores + self.expert_bias)
        weights = scores.gather(1, ids)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.config.routed_scaling_factor, ids

    def select(self, biased: Tensor) -> Tensor:
        """Return ids [T, k] of the best biased scores [T, E] within the best groups, best first."""
        groups = biased.view(len(biased), self.config.n_group, -1)
        if self.config.topk_group < self.config.n_group:
            best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
            kept = best.topk(self.config.topk_group, dim=-1).indices
            dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
            groups = groups.masked_fill(dropped[..., None], float("-inf"))
        return groups.flatten(1).topk(self.config.num_experts_per_tok, dim=-1).indices


@use_experts_implementation
class LLaDA2Experts(nn.Module):
    """A layer's routed experts: `gate_up_proj` [E, 2i, h] (gate rows first), `down_proj` [E, h, i].

    This class and the model share a file because transformers looks for the decorator there.
    """

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        shape = (self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        self.gate_up_proj = nn.Parameter(torch.empty(shape))
        shape = (self.num_experts, self.hidden_dim, self.intermediate_dim)
        self.down_proj = nn.Parameter(torch.empty(shape))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map hidden_states [T, h], ids and weights [T, k] -> [T, h], expert by expert."""
        output = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            token, slot = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            result = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            result = result * top_k_weights[token, slot, None]
            output.index_add_(0, token, result.to(output.dtype))
        return output


class LLaDA2SparseMoeBlock(nn.Module):
    """Router, routed experts and shared experts of one layer."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.gate = LLaDA2TopKRouter(config)
        self.experts = LLaDA2Experts(config)
        self.shared_experts = None
        if config.num_shared_experts:
            width = config.moe_intermediate_size * config.num_shared_experts
            self.shared_experts = LLaDA2MLP(config, width)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        _, weights, ids = self.gate(tokens)
        output: Tensor = self.experts(tokens, ids, weights.to(tokens.dtype)).view_as(hidden)
        return output if self.shared_experts is None else output + self.shared_experts(hidden)


class LLaDA2DecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Pre-norm attention and feed-forward, dense in the first layers and sparse after them."""

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = LLaDA2Attention(config, layer_idx)
        dense = layer_idx < config.first_k_dense_replace
        self.mlp: nn.Module = (
            LLaDA2MLP(config, config.intermediate_size) if dense else LLaDA2SparseMoeBlock(config)
        )
        self.input_layernorm = LLaDA2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LLaDA2RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        hidden = hidden + self.attention(self.input_layernorm(hidden), **kwargs)[0]
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class LLaDA2MoePreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Facts about the family for transformers."""

    config: LLaDA2MoeConfig  # a real class, not a string: transformers reads this annotation
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["LLaDA2DecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["expert_bias"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "router_logits": OutputRecorder(LLaDA2TopKRouter, index=0),
        "hidden_states": LLaDA2DecoderLayer,
        "attentions": LLaDA2Attention,
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, LLaDA2Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, LLaDA2TopKRouter):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.expert_bias)


class LLaDA2MoeModel(LLaDA2MoePreTrainedModel):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LLaDA2DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = LLaDA2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.word_embeddings = value

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Map input_ids [b, q] -> last hidden state [b, q, h]; see `LLaDA2MoeModelLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]
        cos, sin = rotary_tables(self.config, position_ids)
        rotary = (cos.to(hidden.dtype), sin.to(hidden.dtype))
        mask = additive_mask(attention_mask, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, rotary=rotary, cache=cache, **kwargs)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache)


class LLaDA2MoeModelLM(LLaDA2MoePreTrainedModel):
    """The language model: every position predicts its own token (no shift).

    It has no `generate`: block diffusion is not token-by-token generation. The decoding loops are
    in `oled.record`.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "lm_head.weight": "model.word_embeddings.weight"
    }

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.model = LLaDA2MoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Run one pass over q positions.

        input_ids: [b, q]. attention_mask: see `additive_mask`; None lets every position see every
        other. position_ids: [b or 1, q], by default counted on from the cache. cache: receives
        this pass's keys and values (`cache.crop(-q)` takes them back); `past_key_values` is its
        older name. logits_to_keep: only the last so many positions get logits; 0 is all. labels:
        [b, q], -100 where no loss is wanted.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )
