"""One pass of LLaDA2: masks, cache, positions, experts implementations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from oled.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM

BLOCK, LENGTH = 4, 12


def block_mask(start: int, stop: int) -> Tensor:
    """Boolean [1, 1, q, stop]: queries start..stop-1 see their block and all blocks before it."""
    queries, keys = torch.arange(start, stop), torch.arange(stop)
    return (keys[None] // BLOCK <= queries[:, None] // BLOCK)[None, None]


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.fixture
def ids(config: LLaDA2MoeConfig) -> Tensor:
    torch.manual_seed(2)
    return torch.randint(config.vocab_size, (2, LENGTH))


@torch.no_grad()
def test_cached_blocks_equal_the_full_forward(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    full = model(ids, attention_mask=block_mask(0, LENGTH)).logits
    cache = DynamicCache(config=model.config)
    for start in range(0, LENGTH, BLOCK):
        stop = start + BLOCK
        inputs = {
            "input_ids": ids[:, start:stop],
            "attention_mask": as_float(block_mask(start, stop)),
            "position_ids": torch.arange(start, stop)[None],
        }
        denoised = model(**inputs, cache=cache).logits
        assert cache.get_seq_length() == stop
        cache.crop(-BLOCK)
        assert cache.get_seq_length() == start
        committed = model(**inputs, past_key_values=cache).logits
        assert torch.equal(denoised, committed)
        torch.testing.assert_close(committed, full[:, start:stop], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_block_sees_itself_both_ways_and_nothing_later(
    model: LLaDA2MoeModelLM, ids: Tensor
) -> None:
    mask = block_mask(0, LENGTH)
    before = model(ids, attention_mask=mask).logits
    changed = ids.clone()
    changed[:, 2 * BLOCK - 1] = 5  # the last token of the second block
    moved = (model(changed, attention_mask=mask).logits - before).abs().amax(dim=(0, 2)) > 1e-6
    assert moved.tolist() == [False] * BLOCK + [True] * (LENGTH - BLOCK)


@torch.no_grad()
def test_masks_of_every_form_agree(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    boolean = block_mask(0, LENGTH)
    expected = model(ids, attention_mask=boolean).logits
    for mask in (as_float(boolean), boolean.expand(2, -1, -1, -1)):
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    everything = model(ids).logits
    assert torch.equal(model(ids, attention_mask=torch.ones(2, LENGTH)).logits, everything)
    assert not torch.allclose(everything, expected)
    with pytest.raises(ValueError, match="3 dimensions"):
        model(ids, attention_mask=boolean[0])
    with pytest.raises(ValueError, match=r"boolean or floating, not torch\.int64"):
        model(ids, attention_mask=boolean.long())


@torch.no_grad()
def test_padded_keys_do_not_matter(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    mask = torch.ones(2, LENGTH)
    mask[:, :3] = 0
    positions = torch.arange(LENGTH)[None]
    padded = model(ids, attention_mask=mask, position_ids=positions).logits[:, 3:]
    alone = model(ids[:, 3:], position_ids=positions[:, 3:]).logits
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_positions_are_honoured(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    """Rotary attention knows distances only: a shift changes nothing, a stretch does."""
    positions = torch.arange(LENGTH)[None]
    plain = model(ids, position_ids=positions).logits
    assert torch.equal(model(ids).logits, plain)
    torch.testing.assert_close(
        model(ids, position_ids=positions + 100).logits, plain, atol=1e-3, rtol=1e-3
    )
    assert not torch.allclose(model(ids, position_ids=positions * 2).logits, plain, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_experts_implementations_agree(
    model: LLaDA2MoeModelLM, ids: Tensor, implementation: str
) -> None:
    model.set_experts_implementation("eager")
    expected = model(ids).logits
    model.set_experts_implementation(implementation)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_of_the_last_positions_only(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    torch.testing.assert_close(
        model(ids, logits_to_keep=3).logits, model(ids).logits[:, -3:], atol=1e-6, rtol=1e-5
    )


@torch.no_grad()
def test_router_logits_and_hidden_states_can_be_captured(
    model: LLaDA2MoeModelLM, ids: Tensor
) -> None:
    output = model(ids, output_router_logits=True, output_hidden_states=True)
    assert [tuple(x.shape) for x in output.router_logits] == [(2 * LENGTH, 8)] * 2
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1


def test_module_paths_are_where_hooks_look_for_them(model: LLaDA2MoeModelLM) -> None:
    names = dict(model.named_modules())
    assert "model.layers.0.mlp.experts" not in names
    for layer in (1, 2):
        experts = names[f"model.layers.{layer}.mlp.experts"]
        assert experts.gate_up_proj.shape == (8, 32, 32)
        assert experts.down_proj.shape == (8, 32, 16)
        assert type(names[f"model.layers.{layer}.mlp.gate"]).__name__ == "LLaDA2TopKRouter"


def test_loss_counts_labelled_positions_only(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    labels = torch.full_like(ids, -100)
    labels[0, 3] = 7
    output = model(ids, labels=labels)
    expected = -output.logits[0, 3].log_softmax(-1)[7]
    torch.testing.assert_close(output.loss, expected)
