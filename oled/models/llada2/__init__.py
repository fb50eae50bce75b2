"""LLaDA2 for transformers 5. Importing it registers the family with the Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_llada2 import LLaDA2MoeConfig
from .conversion import register_conversions
from .modeling_llada2 import LLaDA2MoeModel, LLaDA2MoeModelLM, LLaDA2TopKRouter

AutoConfig.register(LLaDA2MoeConfig.model_type, LLaDA2MoeConfig, exist_ok=True)
AutoModel.register(LLaDA2MoeConfig, LLaDA2MoeModel, exist_ok=True)
AutoModelForCausalLM.register(LLaDA2MoeConfig, LLaDA2MoeModelLM, exist_ok=True)
register_conversions()

__all__ = ["LLaDA2MoeConfig", "LLaDA2MoeModel", "LLaDA2MoeModelLM", "LLaDA2TopKRouter"]
