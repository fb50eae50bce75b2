"""The pieces of `train_predictors.py` and `posttrain_router.py` that have to be right."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from posttrain_router import Settings, mass_outside, two_forwards
from predictor_bench import Bench, Recipe
from predictor_drafts import Drafts, drafts_of
from predictor_features import Features, collect
from predictor_surrogates import low_rank, surrogates_of
from torch import Tensor, nn
from train_predictors import heads_of

from oled.record import LoadedModel, plain_prompt
from oled.running.families import Scoring
from oled.running.loading import load_model
from oled.running.modules import moe_layers
from oled.running.prompts import tokenize

HIDDEN, EXPERTS, TOP_K, TOKENS = 12, 16, 2, 1500
RECIPE = Recipe(epochs=30, batch=256, rate=2e-2, rank=3, new_tokens=20)


class Router(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=generator))


def routed(router: Router, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return (hidden @ router.weight.T).topk(TOP_K, dim=-1).indices.short()


def bench(seed: int = 3) -> Bench:
    """Two rows, two passes. The second row's input is the first's after a low-rank step; in the
    second pass the first row's input is a rotation of that in the first pass."""
    generator = torch.Generator().manual_seed(seed)
    routers = [Router(generator) for _ in range(2)]
    turn = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q
    down, up = (torch.randn(3, HIDDEN, generator=generator) for _ in range(2))

    def features() -> Features:
        first = torch.randn(TOKENS, HIDDEN, generator=generator)
        rows = torch.cat((first, first @ turn.T))
        hidden = torch.stack((rows, rows + 0.3 * rows @ down.T @ up)).half()
        ids = torch.stack([routed(r, h.float()) for r, h in zip(routers, hidden, strict=True)])
        following = torch.cat((torch.arange(TOKENS) + TOKENS, torch.full((TOKENS,), -1)))
        return Features(hidden, ids, torch.ones(ids.shape).half(), following)

    return Bench(list(routers), Scoring.SOFTMAX, features(), features())


def test_heads_learn_what_follows_where_the_router_knows_the_present() -> None:
    _, card = heads_of(bench(), RECIPE)
    for row in card["temporal"]:
        assert row["recall"] > row["recall_of_the_router"] + 0.3
    for row in card["spatial"]:  # of the first: on the last row, a forward earlier
        assert row["recall"] > row["recall_of_the_router"] + 0.2


def test_drafts_learn_the_step_between_two_layers() -> None:
    tensors, card = drafts_of(bench(), RECIPE)
    assert card["after"][1]["recall"] > card["before"][1]["recall"] + 0.2
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "sharpness": (1,),
        "down.0": (3, HIDDEN),
        "up.0": (HIDDEN, 3),
    }


def test_untrained_drafts_ask_the_next_gate() -> None:
    made = bench()
    drafts = Drafts(made, RECIPE)
    ((ahead, row, z, chooses),) = drafts.say(made.test, torch.arange(5))
    assert (ahead, row) == (1, 1)
    assert torch.equal(z, made.test.hidden[0, :5].float())
    expected = RECIPE.sharpness * z @ made.weight(1).T
    torch.testing.assert_close(chooses, expected)


def test_a_token_is_followed_by_its_position_in_the_next_pass_of_its_block() -> None:
    _, model, tokenizer, _ = load_model("tiny")
    loaded = LoadedModel("tiny", model, tokenizer, torch.float16)
    prompts = [plain_prompt("Question: 1 + 2?\nAnswer:", " 3") for _ in range(2)]
    found = collect(loaded, prompts, RECIPE.decode)
    settings = RECIPE.decode.resolve(model, tokenizer)
    expected, start = [], 0
    for request in tokenize(prompts, tokenizer):
        passes = [done.shares[0].positions for done in settings.decode(model, [request])]
        for now, after in pairwise([*passes, np.zeros(0, np.int64)]):
            places = {int(p): start + len(now) + i for i, p in enumerate(after)}
            expected += [places.get(int(p), -1) for p in now]
            start += len(now)
    assert found.following.tolist() == expected
    assert found.hidden.shape[:2] == (4, start)
    assert (found.following >= 0).sum() > start // 2


def test_the_next_forward_has_two_positions_of_a_block_opened() -> None:
    first, after = two_forwards(3, 64, Settings(), step=7)
    assert not (after & ~first).any()
    masked, left = (x.view(-1, 16).sum(1) for x in (first, after))
    assert torch.equal(left, (masked - 2).clamp_min(0))


def test_mass_outside_the_cache_by_hand() -> None:
    """One block of 16 equal tokens, three experts, one slot; all logits 0 but expert 0's, and the
    heads say nothing (0.5 for all).

    Priorities 0.5 + (s, 0.5, 0.5) with s = sigmoid(1): kth is expert 0's, whose membership is 0.5;
    the others have sigmoid((0.5 - s) / T). In the next forward weights are 3/4 and 1/4 on 0 and 2.
    """
    settings = Settings(slots=1, temperature=0.1)
    tokens = 3 * 16  # this forward, the next, clean
    logits = torch.zeros(tokens, 3)
    logits[:, 0] = 1.0
    ids, weights = torch.tensor([[0, 2]]).expand(tokens, -1), torch.tensor([[1.5, 0.5]])
    seen = [(torch.zeros(tokens, HIDDEN), logits, weights.expand(tokens, -1), ids)]
    heads = nn.ParameterList([torch.zeros(3, HIDDEN)])
    found = mass_outside(seen, heads, 1, settings).item()
    score = 1 / (1 + np.exp(-1.0))
    other = 1 / (1 + np.exp((score - 0.5) / 0.1))
    assert abs(found - (0.75 * 0.5 + 0.25 * (1 - other))) < 1e-5


def test_a_low_rank_map_is_found() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(200, HIDDEN, generator=generator), torch.rand(200) + 0.1
    down, up = (torch.randn(*s, generator=generator) for s in ((3, HIDDEN), (HIDDEN, 3)))
    found_down, found_up = low_rank(x, x @ down.T @ up.T, weight, 3, ridge=1e-6)
    torch.testing.assert_close(found_up @ found_down, up @ down, atol=1e-3, rtol=1e-3)


def test_no_map_of_that_rank_does_better() -> None:
    """The loss, with its ridge, is that of the optimum: all but the strongest singular values of
    the full fit's predictions are lost; and small steps away from it do not pay."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(60, HIDDEN, generator=generator) for _ in range(2))
    weight, ridge = torch.rand(60, generator=generator) + 0.1, 3.0
    scaled = weight[:, None] * x
    size = ridge / 60 * scaled.square().sum() / HIDDEN

    def loss(matrix: Tensor) -> float:
        error = (weight[:, None] * (y - x @ matrix.T)).square().sum()
        return float(error + size * matrix.square().sum())

    down, up = low_rank(x, y, weight, 2, ridge)
    assert down.shape == (2, HIDDEN)
    best = loss(up @ down)
    rows = torch.cat((scaled, size.sqrt() * torch.eye(HIDDEN)))
    targets = torch.cat((weight[:, None] * y, torch.zeros(HIDDEN, HIDDEN)))
    full = torch.linalg.lstsq(rows, targets).solution
    lost = torch.linalg.svdvals(rows @ full)[2:].square().sum()
    assert abs(best - (loss(full.T) + float(lost))) < 1e-2
    for _ in range(20):
        other = up + 0.01 * torch.randn(up.shape, generator=generator)
        assert loss(other @ down) > best


def test_surrogates_miss_less_than_nothing_and_rare_experts_have_none() -> None:
    model = load_model("tiny").model
    layers = moe_layers(model)[:1]
    generator = torch.Generator().manual_seed(6)
    basis = torch.randn(4, 128, generator=generator)

    def features() -> Features:
        around = 0.5 + 0.2 * torch.randn(1, 400, 4, generator=generator)  # not even, as a gate is
        hidden = (around @ basis).half()
        ids = torch.randint(0, 3, (1, 400, 1), generator=generator).short()
        return Features(hidden, ids, torch.ones(ids.shape).half(), torch.full((400,), -1))

    made = Bench([], Scoring.SIGMOID, features(), features())
    tensors, (missed,) = surrogates_of(layers, made, Recipe(surrogate_rank=16))
    assert missed < 0.5
    assert tensors["surrogate_down.0"].shape == (128, 16, 128)
    assert (tensors["surrogate_up.0"][:3] != 0).any(dim=(1, 2)).all()
    assert (tensors["surrogate_up.0"][3:] == 0).all()
