"""Models under a route-changing rule: the trace's own functions, closed loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oled.altered.reroute import Reroute, reroute_trace
from oled.altered.reroute.block_pool import BlockPool
from oled.altered.reroute.des_seq import DesSeq
from oled.altered.reroute.des_vote import DesVote
from oled.errors import UserError
from oled.record import LoadedModel, record
from oled.running.decode import BlockDiffusion
from oled.running.prompts import plain_prompt
from oled.running.recorder import Recorder
from oled.running.rerouting import Rerouting
from oled.trace import Phase, Trace, load

from .conftest import CONFIGS, build

PROMPTS = [plain_prompt("one and two"), plain_prompt("a longer one, three and four")]
DECODE = BlockDiffusion(block_length=8, threshold=0.2, max_new_tokens=16)


def recorded(loaded: LoadedModel, out: Path, rule: Reroute | None, **options: int) -> Trace:
    record(loaded, PROMPTS, DECODE, out, score_width=8, reroute=rule, **options)
    return load(out)


def routes(trace: Trace, forward: int | None = None, layer: int | None = None) -> tuple[bytes, ...]:
    """Ids and weights, of one forward or layer if wanted."""
    routing = trace.routing
    chosen = np.ones(len(routing.forward), dtype=bool)
    if forward is not None:
        chosen &= routing.forward == forward
    if layer is not None:
        chosen &= routing.layer == layer
    return routing.expert_ids[chosen].tobytes(), routing.weights[chosen].tobytes()


def test_a_pool_of_all_experts_changes_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    plain = recorded(loaded, tmp_path / "plain", None)
    ruled = recorded(loaded, tmp_path / "ruled", DesVote(1.0))
    assert routes(plain) == routes(ruled)
    assert plain.tokens.token_id.tobytes() == ruled.tokens.token_id.tobytes()


@pytest.mark.parametrize("rule", [DesSeq(), DesVote(0.3), BlockPool(0.3)], ids=repr)
def test_until_hidden_states_part_open_and_closed_loop_agree(
    rule: Reroute, loaded: LoadedModel, tmp_path: Path
) -> None:
    """The first MoE layer of the first denoising forward sees the unchanged model's states."""
    plain = recorded(loaded, tmp_path / "plain", None)
    closed = recorded(loaded, tmp_path / "closed", rule)
    opened, _ = reroute_trace(plain, rule)
    first = int(np.argmax(plain.forwards.phase == Phase.DENOISE))
    lowest, highest = plain.geometry.moe_layers[0], plain.geometry.moe_layers[-1]
    assert routes(opened, first, lowest) == routes(closed, first, lowest)
    assert routes(opened, first, lowest) != routes(plain, first, lowest)
    assert routes(opened, first, highest) != routes(closed, first, highest)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_kept_pool_bounds_a_block(batch_size: int, loaded: LoadedModel, tmp_path: Path) -> None:
    """Three of eight experts for all forwards of a block, for each row of a batch its own three."""
    trace = recorded(loaded, tmp_path / "t", BlockPool(0.375, fixed=True), batch_size=batch_size)
    forwards, routing = trace.forwards, trace.routing
    used: dict[tuple[int, ...], set[int]] = {}
    for forward, layer, ids in zip(
        routing.forward.tolist(), routing.layer.tolist(), routing.expert_ids.tolist(), strict=True
    ):
        if forwards.block[forward] >= 0:
            place = (int(forwards.request[forward]), int(forwards.block[forward]), layer)
            used.setdefault(place, set()).update(ids)
    assert len(used) >= 2 * 2 * 3
    assert max(map(len, used.values())) <= 3
    assert len({frozenset(ids) for ids in used.values()}) > 3


def test_the_trace_says_what_the_model_ran_under(loaded: LoadedModel, tmp_path: Path) -> None:
    rule = DesVote(0.3)
    report = record(loaded, PROMPTS, DECODE, tmp_path / "t", reroute=rule)
    assert load(tmp_path / "t").manifest.provenance["reroute"] == {"rule": "DesVote", "share": 0.3}
    assert report.change is not None
    assert 0 < report.change.kept_gate_mass < 1
    assert "routes changed by DesVote(share=0.3)" in str(report)


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"diffusion_gemma"}))
def test_every_family_follows_and_is_given_back(family: str) -> None:
    model, tokens = build(family), torch.arange(24).reshape(2, 12)
    plain = model(tokens).logits
    rerouting = Rerouting(model, DesVote(0.4))  # three of eight
    rows = [np.arange(12), 12 + np.arange(12)]
    with torch.no_grad(), rerouting, Recorder(model) as recorder:
        rerouting.expect(24, [(row, (number, 0)) for number, row in enumerate(rows)])
        changed = model(tokens).logits
        capture = recorder.take(24)
        rerouting.expect(24, [])
        unchanged = model(tokens).logits
        recorder.take(24)
    for layer in capture.expert_ids:
        for row in rows:
            assert len(np.unique(layer[row])) <= 3
            assert all(len(set(ids)) == len(ids) for ids in layer[row].tolist())
    assert not torch.allclose(plain, changed)
    assert torch.equal(unchanged, plain)
    assert torch.equal(model(tokens).logits, plain)


def test_a_pass_that_was_not_announced_is_noticed(llada: PreTrainedModel) -> None:
    rerouting = Rerouting(llada, DesVote())
    rerouting.expect(8, [(np.arange(8), (0, 0))])
    with rerouting, pytest.raises(UserError, match="a router saw 4 tokens of a pass of 8"):
        llada(torch.arange(4)[None])


def test_weights_that_are_no_scaled_scores_are_refused() -> None:
    with pytest.raises(UserError, match="its routes can not be changed"):
        Rerouting(build("diffusion_gemma"), DesVote())
