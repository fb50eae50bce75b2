"""The small model's autoregressive twin: the same shape under causal attention.

Trained by `Recipe(autoregressive_until=1)`. transformers' LLaDA2 puts nothing causal on top of a
caller's mask; the twin does, which lets `decode=autoregressive` record it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from oled.models.llada2 import LLaDA2MoeModelLM


class CausalTwin(LLaDA2MoeModelLM):
    """LLaDA2 in which a position sees itself and what stands before it."""

    @classmethod
    def can_generate(cls) -> bool:
        return True

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """input_ids: [b, q]. attention_mask: [b, s], 1 = a real key; None = all are."""
        cached = 0 if cache is None else cache.get_seq_length()
        stop = cached + input_ids.shape[1]
        visible = torch.ones(stop, stop, dtype=torch.bool).tril()[cached:]
        visible = visible[None].expand(len(input_ids), -1, -1)
        if attention_mask is not None:
            visible = visible & attention_mask[:, None].bool() | torch.eye(stop).bool()[cached:]
        return super().forward(input_ids, visible[:, None], cache=cache, **kwargs)
