"""The pieces of `experiments/training/train_tiny.py` that have to be right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_attention
import tiny_data
import tiny_experts
import torch
from tiny_objective import Routes, diffusion_loss
from tiny_optimizer import optimizers, orthogonalized
from tiny_recipe import Recipe
from train_tiny import Budget, Trainer
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
    """Every noisy copy gives a block the logits of a denoising forward against the cache."""
    block, length, mask_id = 4, 12, model.config.mask_token_id
    clean = torch.randint(2, 96, (2, length))
    noise = tiny_data.stratified_noise(2, length, block, np.random.default_rng(1))
    noise = torch.stack((noise, ~noise), dim=1)
    ids, positions = tiny_data.copies(clean, noise, mask_id)
    usual = model.config._attn_implementation
    with torch.no_grad():
        model.set_attn_implementation(tiny_attention.NAME)
        trained = model(ids, position_ids=positions, copies=3, block=block).logits
        model.set_attn_implementation(usual)
        noisy = ids.unflatten(1, (3, length))[:, :2]
        logits = trained.unflatten(1, (3, length))[:, :2]
        cache = DynamicCache(config=model.config)
        for start in range(0, length, block):
            here = slice(start, start + block)
            where = torch.arange(length)[None, here]
            for copy in range(2):
                decoded = model(noisy[:, copy, here], position_ids=where, cache=cache).logits
                torch.testing.assert_close(logits[:, copy, here], decoded, atol=1e-5, rtol=1e-5)
                cache.crop(-block)
            model(clean[:, here], position_ids=where, cache=cache)


def test_attention_without_copies_is_causal(model: LLaDA2MoeModelLM) -> None:
    ids = torch.randint(2, 96, (1, 9))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        masked = model(ids, attention_mask=causal).logits
        model.set_attn_implementation(tiny_attention.NAME)
        torch.testing.assert_close(model(ids).logits, masked, atol=1e-5, rtol=1e-5)


def test_loss_is_the_mean_over_blocks_of_the_mean_over_masks(model: LLaDA2MoeModelLM) -> None:
    block, clean = 4, torch.randint(2, 96, (1, 8))
    noise = torch.tensor([[[True, False, False, False, True, True, False, True]]])
    ids, positions = tiny_data.copies(clean, noise, model.config.mask_token_id)
    model.set_attn_implementation(tiny_attention.NAME)
    with torch.no_grad():
        logs = model(ids, position_ids=positions, copies=2, block=block).logits.log_softmax(-1)
        each = -logs[0, :8].gather(1, clean[0, :, None]).flatten()
        expected = (each[0] + each[[4, 5, 7]].mean()) / 2
        loss = diffusion_loss(model, clean, noise.transpose(0, 1), block)
        torch.testing.assert_close(loss, expected)
        # the complement of a block without masks is no block
        whole = torch.stack((torch.ones_like(clean).bool(), torch.zeros_like(clean).bool()))
        alone = diffusion_loss(model, clean, whole[:1], block)
        torch.testing.assert_close(diffusion_loss(model, clean, whole, block), alone)


def test_alignment_is_least_where_masks_go_the_way_of_their_tokens(
    model: LLaDA2MoeModelLM,
) -> None:
    routes = Routes(model)
    weights, ids = torch.tensor([[0.5, 0.5]] * 4), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    noise = torch.tensor([[[True, False]]])  # one window, one copy, two positions

    def of(masked: list[float]) -> float:
        logits = torch.zeros(4, 4)
        logits[0] = torch.tensor(masked)
        routes.seen = [(logits, weights, ids)]
        return routes.alignment(noise).item()

    assert of([0.0, 0.0, 0.0, 0.0]) == pytest.approx(np.log(4))
    assert of([9.0, 9.0, 0.0, 0.0]) == pytest.approx(np.log(2), abs=1e-3)
    assert of([0.0, 0.0, 9.0, 9.0]) > 9


def test_load_counts_masked_tokens_as_told(model: LLaDA2MoeModelLM) -> None:
    routes = Routes(model)
    ids = torch.tensor([[0, 1], [1, 2]])
    routes.seen = [(torch.empty(0), torch.empty(0), ids)]
    masked = torch.tensor([True, False])
    assert routes.load(masked, 1.0).tolist() == [[1, 2, 1, 0, 0, 0, 0, 0]]
    assert routes.load(masked, 4.0).tolist() == [[4, 5, 1, 0, 0, 0, 0, 0]]


def test_muon_moves_matrices_by_orthogonal_steps() -> None:
    torch.manual_seed(0)
    for shape in ((3, 8, 32), (3, 32, 8), (16, 16)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.4


def test_every_parameter_is_in_one_optimizer(model: LLaDA2MoeModelLM) -> None:
    for muon in (False, True):
        found = [
            id(p)
            for optimizer in optimizers(model, Recipe(muon=muon))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        assert sorted(found) == sorted(id(p) for p in model.parameters())


def test_a_run_in_two_pieces_is_the_run_in_one(tmp_path: Path) -> None:
    """The same weights, bit by bit, after a stop in the middle."""
    corpus = tiny_data.Corpus(np.arange(400) % 60 + 2, np.arange(0, 401, 40))
    recipe = Recipe(
        vocab_size=64, num_experts=16, experts_per_token=2, expert_width=8, moe_layers=1,
        dense_width=32, length=32, windows=2, muon=True, alignment=0.1, complement=True,
        held_out_windows=6,
    )  # fmt: skip

    def trained(name: str, *pieces: int) -> dict[str, torch.Tensor]:
        out = tmp_path / name
        out.mkdir()
        for stop in pieces:
            budget = Budget(steps=6, evaluate_every=6, checkpoint_every=3)
            trainer = Trainer(out, recipe, budget, tiny_data.Mixture((corpus,)), corpus)
            while trainer.step < stop:
                trainer.update()
            trainer.save()
        return trainer.model.state_dict()

    whole, pieces = trained("whole", 6), trained("pieces", 3, 6)
    assert all(torch.equal(value, pieces[name]) for name, value in whole.items())


def test_windows_depend_on_nothing_but_their_number() -> None:
    corpus = tiny_data.Corpus(np.arange(100), np.array([0, 30, 45, 100]))
    items = np.arange(12)
    whole = corpus.windows(items, 8, seed=3)
    parts = torch.cat([corpus.windows(items[:5], 8, 3), corpus.windows(items[5:], 8, 3)])
    assert torch.equal(whole, parts)
    assert torch.equal((whole[:, 1:] - whole[:, :-1]) % 100, torch.ones(12, 7, dtype=torch.int64))
    plain = corpus.windows(np.arange(3), 8, 3, shuffle=False)
    assert plain[:, 0].tolist() == [0, 30, 45]


def test_a_mixture_takes_turns_and_leaves_nothing_out() -> None:
    one, two = (tiny_data.Corpus(np.full(30, value), np.array([0, 10, 20, 30])) for value in (5, 7))
    windows = tiny_data.Mixture((one, two, one)).windows(np.arange(6), 4, seed=0)
    assert windows[:, 0].tolist() == [5, 7, 5, 5, 7, 5]
    alone = tiny_data.Corpus(np.arange(30), np.arange(0, 31, 3))
    mixed = tiny_data.Mixture((one, alone)).windows(np.arange(8), 4, seed=2)[1::2]
    assert torch.equal(mixed, alone.windows(np.arange(4), 4, seed=2))


def test_long_documents_start_more_than_once() -> None:
    texts = ["a" * 40, "bb"]
    tokenizer = tiny_data.train_tokenizer(["ab"], 258)  # bytes alone
    corpus = tiny_data.Corpus.encode(texts, tokenizer, longest=16)
    assert corpus.starts.tolist() == [0, 16, 32, 41, 44]


def test_tokenizer_keeps_digits_apart_and_restores_text() -> None:
    texts = ["Question: 1234 apples cost $5.60?\nAnswer: é"] * 3
    tokenizer = tiny_data.train_tokenizer(texts, 300)
    ids = tokenizer(texts[0])["input_ids"]
    assert [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]).isdigit()] == list(
        "1234560"
    )
    assert tokenizer.decode(ids) == texts[0]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 0, 1)
