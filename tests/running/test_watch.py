"""Decoding that can not go on: outputs that are not finite, passes that decide nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from oled.errors import UserError
from oled.record import (
    Autoregressive,
    BlockDiffusion,
    CanvasDiffusion,
    Decoding,
    Drafting,
    LoadedModel,
    SpeculativeAutoregressive,
    SpeculativeBlocks,
    plain_prompt,
    record,
)
from oled.running.decode import DecodingError, Pass, Request
from oled.running.decode.batch import Row
from oled.running.decode.block_diffusion import BlockLoop
from oled.trace.check import check
from oled.trace.manifest import Status, read_manifest
from oled.trace.reader import load
from oled.trace.schema import Phase

from .conftest import build

PROMPTS = [plain_prompt("How many pears?"), plain_prompt("Trip")]
DRAFT = Drafting(experts=None, most=3)
LOOPS: dict[str, tuple[str, Decoding]] = {
    "autoregressive": ("qwen3_moe", Autoregressive(max_new_tokens=12, eos_ids=(0,))),
    "block_diffusion": ("llada2_moe", BlockDiffusion(block_length=8, max_new_tokens=24)),
    "canvas_diffusion": (
        "diffusion_gemma",
        CanvasDiffusion(max_denoising_steps=3, max_new_tokens=16, eos_ids=()),
    ),
    "speculative_autoregressive": (
        "qwen2_moe",
        SpeculativeAutoregressive(max_new_tokens=12, eos_ids=(), draft=DRAFT),
    ),
    "speculative_blocks": (
        "llada2_moe",
        SpeculativeBlocks(block_length=8, max_new_tokens=24, draft=DRAFT),
    ),
}


@contextmanager
def broken_head(
    model: PreTrainedModel, healthy: int, value: float, column: int = -1
) -> Iterator[None]:
    """Give logits of `value` at one column, after so many healthy runs of the head."""
    runs = 0

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs > healthy:
            output = output.clone()
            output[:, column, 5] = value
        return output

    handle = model.get_output_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("loop", "value"),
    # DiffusionGemma caps its logits, which makes infinite ones finite
    [(loop, math.nan) for loop in sorted(LOOPS)]
    + [("autoregressive", math.inf), ("block_diffusion", math.inf)],
)
def test_logits_that_are_not_finite_end_every_loop(
    loop: str, value: float, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    family, decode = LOOPS[loop]
    model = build(family)
    loaded = LoadedModel(family, model, tokenizer, torch.float32)
    with (
        broken_head(model, 3, value),
        pytest.raises(DecodingError, match=r"^request 0, forward \d+ \(") as error,
    ):
        record(loaded, PROMPTS, decode, tmp_path / "t")
    assert isinstance(error.value, UserError)
    assert "is not finite" in str(error.value)
    assert str(tmp_path / "t") in str(error.value)
    assert read_manifest(tmp_path / "t").status is Status.PARTIAL
    assert not check(tmp_path / "t").ok
    trace = load(tmp_path / "t", allow_partial=True)
    assert trace.num_forwards == error.value.forward > 0  # all before it are kept


def test_the_error_names_request_forward_and_position(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Two prompts of 15 and 4 tokens one after the other, 3 tokens each."""
    model = build("qwen3_moe")
    loaded = LoadedModel("q", model, tokenizer, torch.float32)
    decode = Autoregressive(max_new_tokens=3, eos_ids=())
    with broken_head(model, 4, math.nan), pytest.raises(DecodingError) as error:
        record(loaded, PROMPTS, decode, tmp_path / "t")
    assert str(error.value).startswith("request 1, forward 4 (decode), position 4: ")
    with broken_head(model, 2, math.nan), pytest.raises(DecodingError) as error:
        record(loaded, PROMPTS, decode, tmp_path / "batch", batch_size=2)
    assert str(error.value).startswith("request 0, forward 4 (decode), position 16: ")
    llada = LoadedModel("l", build("llada2_moe"), tokenizer, torch.float32)
    blocks = BlockDiffusion(block_length=8, max_new_tokens=24, tokens_per_forward=8, eos_ids=())
    with broken_head(llada.model, 2, math.nan, column=3), pytest.raises(DecodingError) as error:
        record(llada, PROMPTS, blocks, tmp_path / "blocks")
    # forward 0 prefills 8 positions, 1 denoises and 2 commits the second block
    assert str(error.value).startswith(
        "request 0, forward 3 (denoise, block 2, step 0), position 19: "
    )


def test_a_forbidden_token_is_no_fault(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = build("qwen3_moe")
    loaded = LoadedModel("q", model, tokenizer, torch.float32)
    with broken_head(model, 0, -math.inf):
        record(loaded, PROMPTS, Autoregressive(max_new_tokens=3), tmp_path / "t")
    assert check(tmp_path / "t").ok


def test_gate_weights_that_are_not_finite(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """A prefill without the head: the routers alone show it, at every place of the block."""
    model = build("llada2_moe")
    loaded = LoadedModel("l", model, tokenizer, torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[loaded.tokenizer("p")["input_ids"][0]] = math.nan
    decode = BlockDiffusion(block_length=8, max_new_tokens=0)
    with pytest.raises(DecodingError) as error:
        record(loaded, [plain_prompt("Trim"), plain_prompt("Tip")], decode, tmp_path / "t")
    assert str(error.value).startswith(
        "request 1, forward 1 (prefill), position 0: the router of layer 1 gives the weight nan"
    )
    assert load(tmp_path / "t", allow_partial=True).num_forwards == 1


@pytest.mark.parametrize("loop", ["block_diffusion", "speculative_blocks"])
def test_a_pass_that_decides_nothing_is_an_error(
    loop: str,
    llada: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        BlockLoop, "_accept", lambda self, masked, confidence: np.zeros_like(masked)
    )
    decode = LOOPS[loop][1].resolve(llada, tokenizer)
    with pytest.raises(DecodingError, match=r"decides no token.*would not end") as error:
        list(decode.decode(llada, [Request(7, np.arange(2, 12))]))
    assert "request 7, forward " in str(error.value)
    assert "position 10" in str(error.value)


def test_a_block_takes_no_more_passes_than_its_length(
    llada: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that are opened but never counted as such."""
    write = Row.write

    def forgetful(row: Row, positions: Any, choice: Any) -> None:
        write(row, positions, choice)
        row.open[positions] = False

    monkeypatch.setattr(Row, "write", forgetful)
    decode = BlockDiffusion(block_length=8, max_new_tokens=8).resolve(llada, tokenizer)
    done: list[Pass] = []
    with pytest.raises(DecodingError, match="after 8 passes"):
        done.extend(decode.decode(llada, [Request(0, np.arange(2, 10))]))
    assert sum(one.phase is Phase.DENOISE for one in done) == 8
