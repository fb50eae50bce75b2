"""What decides a training run of the small model, besides data and time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from oled.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape, text, objective and optimizer of a run; the defaults are the bundled model's."""

    vocab_size: int = 1024
    num_experts: int = 128
    experts_per_token: int = 4
    expert_width: int = 32
    dense_layers: int = 1
    moe_layers: int = 4
    dense_width: int = 384

    text: tuple[str, ...] = (
        "gsm8k",
        "python",
        "gsm8k",
        "docs",
        "gsm8k",
    )  # sources of the windows, in turns
    length: int = 256  # clean positions of a window
    windows: int = 6  # of a step, for each process
    blocks: tuple[int, ...] = (16, 8, 16, 32)  # in turns, so that one model serves all
    first_blocks: tuple[int, ...] = ()  # instead of `blocks`, until `first_until` of the budget
    first_until: float = 0.0
    autoregressive_until: float = 0.0  # of the budget: next-token prediction before
    complement: bool = True  # each window twice, masked here and masked there
    alignment: float = 0.3  # weight: masks are routed like the tokens that they hide
    sharpening: float = 0.0  # weight of the entropy of right predictions
    mask_mean: bool = False  # the mask's embedding begins as the mean of all
    mask_frozen: bool = False

    muon: bool = False  # matrices of the layers by Muon, the rest by AdamW
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    clip: float = 1.0
    warmup_steps: int = 50
    flat_until: float = 0.4  # of the budget; then linear to zero
    balance_step: float = 0.01  # falls with the learning rate, but has no warm-up
    balance_slack: float = 0.0  # loads within (1 ± slack) of the mean are left alone
    balance_masked: float = 1.0  # weight of a masked token in the load
    seed: int = 1234
    held_out_windows: int = 48


FIRST = Recipe(
    text=("gsm8k",),
    windows=12,
    blocks=(16, 32),
    complement=False,
    alignment=0.0,
    learning_rate=3e-3,
)
"""What the bundled run begins with: form and grammar, from one source."""

RECIPES = {
    "bundled": Recipe(),
    "first": FIRST,
    "twin": replace(Recipe(), autoregressive_until=1.0, complement=False, alignment=0.0),
}


def tiny_config(recipe: Recipe) -> LLaDA2MoeConfig:
    """The model's shape; what the recipe does not vary is fixed here."""
    return LLaDA2MoeConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=128,
        intermediate_size=recipe.dense_width,
        moe_intermediate_size=recipe.expert_width,
        num_hidden_layers=recipe.dense_layers + recipe.moe_layers,
        first_k_dense_replace=recipe.dense_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.06,  # with 0.02 the first few hundred steps leave most experts idle
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        num_experts=recipe.num_experts,
        num_experts_per_tok=recipe.experts_per_token,
        block_length=16,
        mask_token_id=1,
        pad_token_id=0,
        eos_token_id=0,
    )


def initial_model(recipe: Recipe) -> LLaDA2MoeModelLM:
    """The untrained model, the control of every locality figure."""
    torch.manual_seed(recipe.seed)
    return LLaDA2MoeModelLM(tiny_config(recipe))
