"""A LLaDA2 small enough to test with, and the folder of the training scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oled.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "training"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only get slower when they are shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config() -> LLaDA2MoeConfig:
    """3 layers (the first dense), 8 experts in 4 groups, top-2, half of each head rotated."""
    return LLaDA2MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        initializer_range=0.2,
        mask_token_id=1,
        pad_token_id=0,
        eos_token_id=0,
    )


@pytest.fixture
def model(config: LLaDA2MoeConfig) -> LLaDA2MoeModelLM:
    """Random weights with a selection bias that matters."""
    torch.manual_seed(0)
    model = LLaDA2MoeModelLM(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(0, 0.3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model
