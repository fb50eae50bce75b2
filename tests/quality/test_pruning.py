"""Compatible paths are found where they were put, and a model on its paths computes by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from oled.altered.split import PathPlan
from oled.errors import UserError
from oled.quality.pruning import PrunedPaths, choose_sources, path_errors, prune_paths
from oled.quality.split_experts import SplitExperts, load_paths, save_paths
from oled.running.decode import BlockDiffusion, Request
from oled.running.modules import moe_layers
from oled.running.prompts import plain_prompt, tokenize
from tests.running.conftest import EOS, MASK, build

DECODE = BlockDiffusion(block_length=8, max_new_tokens=16, mask_id=MASK, eos_ids=(EOS,))
INF = np.inf


@pytest.fixture
def requests(tokenizer: PreTrainedTokenizerFast) -> list[Request]:
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, 60))) for _ in range(8)]
    return tokenize([plain_prompt(text[:10], text[10:]) for text in texts], tokenizer)


@pytest.fixture
def twins(llada: PreTrainedModel) -> PreTrainedModel:
    """In every layer expert 5 expands as expert 2 does, in another order of units."""
    with torch.no_grad():
        for entry in moe_layers(llada):
            weights = entry.experts.gate_up_proj
            width = weights.shape[1] // 2
            turned = torch.arange(width).flip(0)
            weights[5] = weights[2][torch.cat((turned, width + turned))]
    return llada


def test_sources_by_hand() -> None:
    errors = np.array(
        [
            [0.0, 0.1, 0.3, 0.9, INF],
            [0.2, 0.0, 0.2, 0.9, INF],
            [0.9, 0.9, 0.0, 0.25, INF],
            [0.9, 0.9, 0.1, 0.0, INF],
            [0.9, 0.9, 0.9, 0.9, 0.0],
        ]
    )
    # at 0.2 expansion 1 serves 0, 1 and 2; 3 serves itself (and 2, better than 1 does); 4 itself
    assert choose_sources(errors, 0.2, 1).tolist() == [1, 1, 3, 3, 4]
    assert choose_sources(errors, 0.0, 1).tolist() == [0, 1, 2, 3, 4]
    # at 0.3 expansion 0 serves 0, 1 and 2; of its followers 2 loses most, so it is kept first
    assert choose_sources(errors, 0.3, 1).tolist() == [0, 0, 2, 2, 4]
    assert choose_sources(errors, 0.2, 4).tolist() == [0, 1, 3, 3, 4]


def test_equal_expansions_are_compatible(twins: PreTrainedModel) -> None:
    experts = moe_layers(twins)[0].experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(800, 32, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(800)])
    weights = torch.rand(800, 2, generator=generator) + 0.5
    errors = path_errors(experts, hidden, ids, weights)
    assert errors[2, 5] < 1e-4
    assert errors[5, 2] < 1e-4
    assert (np.diag(errors) == 0).all()
    others = errors[~np.eye(8, dtype=bool) & ~np.isin(np.arange(64).reshape(8, 8), [21, 42])]
    assert others.min() > 0.05
    seldom = path_errors(experts, hidden[:40], ids[:40], weights[:40])
    assert np.isinf(seldom[~np.eye(8, dtype=bool)]).all()


def test_what_costs_nothing_is_pruned(twins: PreTrainedModel, requests: list[Request]) -> None:
    paths = prune_paths(twins, requests, DECODE, 0.01)
    assert paths.plan.expansions == (7,) * 3
    tokens = torch.arange(16)[None]
    with torch.inference_mode():
        before = twins(tokens).logits
        with SplitExperts(twins, paths):
            on_paths = twins(tokens).logits
        after = twins(tokens).logits
    assert float((on_paths - before).norm() / before.norm()) < 0.02
    assert not torch.equal(on_paths, before)
    assert torch.equal(after, before)


def test_a_tolerance_prunes_more_and_loses_more(
    llada: PreTrainedModel, requests: list[Request]
) -> None:
    kept, lost = [], []
    tokens = torch.arange(16)[None]
    for tolerance in (0.0, 0.6, 0.95):
        paths = prune_paths(llada, requests, DECODE, tolerance)
        kept.append(sum(paths.plan.expansions))
        assert max(paths.plan.about["worst_error"]) <= tolerance
        with torch.inference_mode():
            plain = llada(tokens).logits
            with SplitExperts(llada, paths):
                lost.append(float((llada(tokens).logits - plain).square().sum()))
    assert kept[0] == 24
    assert kept[0] > kept[1] > kept[2] >= 6
    assert lost[0] == 0 < lost[1] < lost[2]


def test_on_paths_is_an_expert_with_anothers_expansion(llada: PreTrainedModel) -> None:
    source = np.array([0, 1, 2, 3, 4, 5, 6, 3])
    projection = torch.randn(1, 32, 16)
    own = np.arange(8)
    none = torch.zeros(0, 32, 16)
    paths = PrunedPaths(PathPlan((source, own, own)), (projection, none, none))
    experts = moe_layers(llada)[0].experts
    with SplitExperts(llada, paths):
        assert torch.equal(experts.gate_up_proj[7], experts.gate_up_proj[3])
        assert torch.equal(experts.down_proj[7], projection[0])
    assert not torch.equal(experts.gate_up_proj[7], experts.gate_up_proj[3])


def test_paths_are_kept_in_a_file(
    llada: PreTrainedModel, requests: list[Request], tmp_path: Path
) -> None:
    paths = prune_paths(llada, requests, DECODE, 0.8)
    again = load_paths(save_paths(paths, tmp_path / "paths.npz"))
    assert (again.plan.how, again.plan.about) == (paths.plan.how, paths.plan.about)
    for one, other in zip(paths.plan.sources, again.plan.sources, strict=True):
        assert np.array_equal(one, other)
    for mine, theirs in zip(paths.projections, again.projections, strict=True):
        assert torch.equal(mine, theirs)
    (tmp_path / "bad.npz").write_bytes(b"no paths")
    with pytest.raises(UserError, match="no paths can be read"):
        load_paths(tmp_path / "bad.npz")


def test_what_has_no_halves_is_refused(requests: list[Request], llada: PreTrainedModel) -> None:
    with pytest.raises(UserError, match="not a plain gated layer"):
        prune_paths(build("gpt_oss"), requests, DECODE, 0.5)
    with pytest.raises(UserError, match=r"tolerance=1\.5"):
        prune_paths(llada, requests, DECODE, 1.5)
