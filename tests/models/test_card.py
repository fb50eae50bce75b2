"""What the bundled model's card is made with: control, twin, markers."""

from __future__ import annotations

import explore_tiny
import model_card
import numpy as np
import pytest
import tiny_attention
import tiny_policies
import torch
from tiny_twin import CausalTwin
from transformers import DynamicCache

from oled.models.llada2 import LLaDA2MoeConfig
from oled.paths import traces_dir
from oled.trace.reader import load
from oled.trace.schema import TokenState


def test_markers_are_filled_and_nothing_else() -> None:
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert model_card.fill(text, "x", "new") == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    assert model_card.fill(text, "y", "new") == text
    with pytest.raises(ValueError, match="at most one"):
        model_card.fill(text + "<!-- x -->", "x", "new")


@pytest.mark.parametrize("how", tiny_policies.CONTROLS)
def test_controls_keep_levels_and_lose_who_had_them(how: str) -> None:
    trace = load(traces_dir() / "demo")
    other = tiny_policies.exchanged(trace, how)
    masked = trace.tokens.state == TokenState.MASKED
    before, after = trace.tokens.confidence, other.tokens.confidence
    np.testing.assert_array_equal(before[~masked], after[~masked])
    forward = np.repeat(np.arange(trace.num_forwards), trace.forwards.tokens)
    first = masked & (forward == forward[masked][0])
    np.testing.assert_array_equal(np.sort(before[first]), np.sort(after[first]))
    if how == "reversed":
        np.testing.assert_array_equal(np.argsort(before[first]), np.argsort(-after[first]))
    assert (before[masked] != after[masked]).mean() > 0.5


def test_a_paired_difference_is_between_the_same_requests() -> None:
    hits = {"gate": np.array([10.0, 90.0]), "other": np.array([11.0, 91.0])}
    ranking = tiny_policies.Ranking(0.25, hits, np.array([100.0, 100.0]))
    gain = ranking.over("other")
    assert (gain.value, gain.low, gain.high) == pytest.approx((1.0, 1.0, 1.0))
    assert ranking.rate("gate").high == pytest.approx(0.9)


def test_the_twin_with_a_cache_is_causal_attention(config: LLaDA2MoeConfig) -> None:
    torch.manual_seed(0)
    twin = CausalTwin(config).eval()
    ids = torch.randint(2, 96, (1, 8))
    with torch.no_grad():
        cache = DynamicCache(config=config)
        parts = [twin(ids[:, :5], torch.ones(1, 5), cache=cache).logits]
        parts += [twin(ids[:, at : at + 1], cache=cache).logits for at in range(5, 8)]
        twin.set_attn_implementation(tiny_attention.NAME)
        whole = twin.lm_head(twin.model(ids).last_hidden_state)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_the_table_of_runs_is_of_the_runs() -> None:
    table = (explore_tiny.RESULTS / "runs.md").read_text(encoding="utf-8")
    assert table == explore_tiny.table(explore_tiny.read())
