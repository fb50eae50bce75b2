"""The pieces of `experiments/train_tiny.py` that have to be right."""

from __future__ import annotations

import numpy as np
import tiny_data
import tiny_experts
import torch
from transformers import DynamicCache

from oled.models.llada2 import LLaDA2MoeModelLM


def test_fast_experts_equal_the_plain_ones_with_their_gradients(model: LLaDA2MoeModelLM) -> None:
    ids = torch.randint(96, (2, 12))
    found = {}
    for implementation in ("eager", tiny_experts.NAME):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        logits = model(ids).logits
        logits.square().sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found[implementation] = (logits.detach(), gradients)
    (plain, plain_gradients), (fast, fast_gradients) = found.values()
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-4)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, atol=1e-3, rtol=1e-3)


def test_noise_is_spread_evenly_over_the_range() -> None:
    noise = tiny_data.stratified_noise(8, 64, 16, np.random.default_rng(0))
    masked = noise.view(-1, 16).sum(1)
    assert masked.bincount(minlength=17).tolist() == [0] + [2] * 16


def test_a_noisy_block_is_trained_on_what_decoding_shows_it(model: LLaDA2MoeModelLM) -> None:
    """The doubled sequence gives a block the logits of a denoising forward against the cache."""
    block, length, mask_id = 4, 12, model.config.mask_token_id
    clean = torch.randint(2, 96, (1, length))
    noise = tiny_data.stratified_noise(1, length, block, np.random.default_rng(1))
    ids, positions = tiny_data.double(clean, noise, mask_id)
    visible = tiny_data.doubled_mask(length, block)
    with torch.no_grad():
        trained = model(ids, attention_mask=visible, position_ids=positions).logits[:, :length]
        cache = DynamicCache(config=model.config)
        for start in range(0, length, block):
            stop = start + block
            where = torch.arange(start, stop)[None]
            decoded = model(ids[:, start:stop], position_ids=where, cache=cache).logits
            torch.testing.assert_close(trained[:, start:stop], decoded, atol=1e-5, rtol=1e-5)
            cache.crop(-block)
            model(clean[:, start:stop], position_ids=where, cache=cache)


def test_windows_depend_on_nothing_but_their_number() -> None:
    corpus = tiny_data.Corpus(np.arange(100), np.array([0, 30, 45, 100]))
    items = np.arange(12)
    whole = corpus.windows(items, 8, seed=3)
    parts = torch.cat([corpus.windows(items[:5], 8, 3), corpus.windows(items[5:], 8, 3)])
    assert torch.equal(whole, parts)
    assert torch.equal((whole[:, 1:] - whole[:, :-1]) % 100, torch.ones(12, 7, dtype=torch.int64))
    plain = corpus.windows(np.arange(3), 8, 3, shuffle=False)
    assert plain[:, 0].tolist() == [0, 30, 45]


def test_tokenizer_keeps_digits_apart_and_restores_text() -> None:
    texts = ["Question: 1234 apples cost $5.60?\nAnswer: é"] * 3
    tokenizer = tiny_data.train_tokenizer(texts, 300)
    ids = tokenizer(texts[0])["input_ids"]
    assert [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]).isdigit()] == list(
        "1234560"
    )
    assert tokenizer.decode(ids) == texts[0]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 0, 1)
