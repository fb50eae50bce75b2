"""The held-out loss is that of decoding, and quality compares like with like."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oled.altered.reroute import Reroute
from oled.altered.reroute.block_pool import BlockPool
from oled.altered.reroute.des_vote import DesVote
from oled.errors import UserError
from oled.quality.heldout import MaskedAnswer, answer_losses
from oled.quality.measure import quality
from oled.record import Autoregressive, LoadedModel
from oled.running.decode import BlockDiffusion, Request
from oled.running.prompts import plain_prompt
from oled.running.rerouting import Rerouting
from oled.running.teacher_forcing import output_tokens
from tests.running.conftest import EOS, MASK, build

L = 8
DECODE = BlockDiffusion(block_length=L, max_new_tokens=16, mask_id=MASK, eos_ids=(EOS,))
REQUEST = Request(3, np.arange(2, 13), np.arange(40, 54))  # 11 and 14 tokens: blocks 1 to 3
PROMPTS = [plain_prompt("one and two", " three"), plain_prompt("four", " five and a half")]


def block_causal(length: int) -> torch.Tensor:
    block = torch.arange(length) // L
    mask = torch.zeros(length, length)
    return mask.masked_fill(block[None] > block[:, None], torch.finfo(torch.float32).min)[
        None, None
    ]


def run_block(
    model: PreTrainedModel, tokens: np.ndarray, rerouting: Rerouting | None, first: int
) -> torch.Tensor:
    """Logits [L, V] of the last block, the blocks before it clean: as decoding without a cache."""
    if rerouting is not None:
        blocks = range(first, len(tokens) // L)
        groups = [(np.arange(b * L, (b + 1) * L), (b, 0)) for b in blocks]
        rerouting.expect(len(tokens), groups)
    with torch.inference_mode():
        return model(
            torch.from_numpy(tokens)[None], attention_mask=block_causal(len(tokens))
        ).logits[0, -L:]


@pytest.mark.parametrize("family", ["llada2_moe", "qwen3_moe"])
@pytest.mark.parametrize("rule", [None, DesVote(0.5), BlockPool(0.5, fixed=True)], ids=repr)
def test_the_loss_is_that_of_denoising_forwards(family: str, rule: Reroute | None) -> None:
    model = build(family)
    one, other = (None if rule is None else Rerouting(model, rule) for _ in range(2))
    if one is None or other is None:
        (found,) = answer_losses(model, [REQUEST], DECODE, seed=5)
        expected = by_blocks(model, None)
    else:
        with one:
            (found,) = answer_losses(model, [REQUEST], DECODE, one, seed=5)
        with other:
            expected = by_blocks(model, other)
    np.testing.assert_allclose(found.bits, expected, rtol=1e-3, atol=1e-4)


def by_blocks(model: PreTrainedModel, rerouting: Rerouting | None) -> np.ndarray:
    """Bits of the same masked positions, a forward a block."""
    answer = MaskedAnswer.of(REQUEST, L, EOS)
    noise = answer.noise(np.random.default_rng((5, REQUEST.index)))
    bits = []
    for block in range(1, 4):
        here = slice(block * L, (block + 1) * L)
        tokens = answer.clean[: here.stop].copy()
        if rerouting is not None and rerouting.begins_with_masks:
            tokens[here] = np.where(answer.maskable[here], MASK, answer.clean[here])
            run_block(model, tokens, rerouting, 1)
        tokens[here] = np.where(noise[here], MASK, answer.clean[here])
        probability = run_block(model, tokens, rerouting, 1).double().log_softmax(-1)
        masked = np.flatnonzero(noise[here])
        bits.append(-probability[masked, answer.clean[here][masked]].numpy() / np.log(2))
    return np.concatenate(bits)


def test_noise_is_in_the_answer_alone_and_in_every_block_of_it() -> None:
    answer = MaskedAnswer.of(REQUEST, L, EOS)
    assert answer.clean.size == 32  # 11 + 14 + the end token, in whole blocks
    assert np.flatnonzero(answer.maskable).tolist() == list(range(11, 26))
    seen = np.zeros(32, dtype=bool)
    for seed in range(40):
        noise = answer.noise(np.random.default_rng(seed))
        assert not noise[~answer.maskable].any()
        assert all(noise[b * L : (b + 1) * L].any() for b in range(1, 4))
        seen |= noise
    assert (seen == answer.maskable).all()


def test_a_rule_that_changes_nothing_costs_nothing(loaded: LoadedModel) -> None:
    decode = dataclasses.replace(DECODE, threshold=0.2)
    found = quality(loaded, PROMPTS, decode, Rerouting(loaded.model, DesVote(1.0)))
    assert found.difference() == (0.0, 0.0, 0.0)
    assert found.same_choice == found.same_tokens == 1.0
    assert found.plain.written == found.altered.written
    assert all(0 < len(text) <= 16 for text in found.plain.written)


def test_a_rule_that_changes_routes_is_measured(loaded: LoadedModel) -> None:
    found = quality(loaded, PROMPTS, DECODE, Rerouting(loaded.model, DesVote(0.3)))
    summary = found.summary()
    more, low, high = found.difference()
    assert more == pytest.approx(summary["bits_per_token"] - summary["bits_per_token_plain"])
    assert low <= more <= high
    assert more != 0
    assert summary["same_choice"] < 1
    assert summary["prompts"] == 2
    assert len(found.lines()) == 3


def test_what_was_written_ends_with_the_end_token(loaded: LoadedModel) -> None:
    forced = dataclasses.replace(DECODE, mode="forced", threshold=0.2)
    passes = list(forced.decode(loaded.model, [REQUEST]))
    assert output_tokens(passes) == [*range(40, 54), EOS]


def test_what_cannot_be_measured_is_refused(loaded: LoadedModel) -> None:
    rerouting = Rerouting(loaded.model, DesVote())
    with pytest.raises(UserError, match="no reference answer"):
        quality(loaded, [plain_prompt("only a question")], DECODE, rerouting)
    with pytest.raises(UserError, match="decode=block_diffusion"):
        quality(loaded, PROMPTS, Autoregressive(), rerouting)
