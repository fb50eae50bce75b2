"""Every family from prompts to a whole trace, and what is documented of such a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from oled.record import (
    Autoregressive,
    BlockDiffusion,
    CanvasDiffusion,
    Decoding,
    LoadedModel,
    plain_prompt,
    record,
)
from oled.running.modules import moe_layers
from oled.trace.check import check
from oled.trace.reader import load
from tests.provides import assert_documented, documented

from .conftest import CONFIGS, build

PROMPTS = [plain_prompt("How many pears?"), plain_prompt("Trip")]
LOOPS: dict[str, Decoding] = {
    "llada2_moe": BlockDiffusion(block_length=8, threshold=0.4, max_new_tokens=16),
    "sdar_moe": BlockDiffusion(threshold=0.4, max_new_tokens=16),
    "diffusion_gemma": CanvasDiffusion(max_denoising_steps=3, max_new_tokens=16, eos_ids=()),
}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_is_recorded_whole(
    family: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = build(family, layers=6)
    decode = LOOPS.get(family, Autoregressive(max_new_tokens=6, eos_ids=()))
    loaded = LoadedModel(family, model, tokenizer, torch.float32)
    record(loaded, PROMPTS, decode, tmp_path / "t", batch_size=2, horizons=4, score_width=8)
    assert check(tmp_path / "t").ok
    trace = load(tmp_path / "t", verify=True)
    layers = [entry.layer for entry in moe_layers(model)]
    assert layers[-1] == 5
    assert np.unique(trace.routing.layer).tolist() == layers == list(trace.geometry.moe_layers)
    assert trace.geometry.num_layers == 6
    assert_documented(f"`{family}`", trace)


def test_no_family_is_forgotten() -> None:
    families = [source for source in documented() if source.strip("`") in CONFIGS]
    assert sorted(source.strip("`") for source in families) == sorted(CONFIGS)
