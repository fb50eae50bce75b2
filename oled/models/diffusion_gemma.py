"""DiffusionGemma is part of transformers; here it joins the models that load by type alone."""

from __future__ import annotations

from transformers import (
    AutoModelForCausalLM,
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
)

AutoModelForCausalLM.register(DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, exist_ok=True)
