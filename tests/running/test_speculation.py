"""Drafts and their verification: the rules by hand, and the text of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from oled.altered.reroute.des_vote import DesVote
from oled.errors import UserError
from oled.record import (
    Autoregressive,
    BlockDiffusion,
    Drafting,
    LoadedModel,
    Mode,
    Recorder,
    SpeculativeAutoregressive,
    SpeculativeBlocks,
    plain_prompt,
    record,
)
from oled.running.decode import Pass, Request
from oled.running.decode.speculation import VerifySet
from oled.running.decode.speculative_autoregressive import tokens_accepted
from oled.running.decode.speculative_blocks import State, steps_accepted
from oled.running.drafting import Draft, DraftExperts, bundled_drafts, load_draft_experts
from oled.running.loading import load_model
from oled.running.modules import moe_layers, router_stacks
from oled.running.predictors import fingerprint, read_heads, write_heads
from oled.trace import load
from oled.trace.check import check
from oled.trace.drafts import Verifications, undrafted
from oled.trace.schema import NO_EXPERT, Phase
from tests.support.seeds import sized

from .conftest import EOS, MASK, build

HIDDEN = 32
BLOCKS: dict[str, Any] = {"block_length": 8, "mask_id": MASK, "eos_ids": (EOS,)}
WIDE = Drafting(experts=None, confidence=0.3, growth=4, most=4)


def draft_file(model: PreTrainedModel, path: Path, width: int = 16) -> Path:
    """Random draft experts for the model."""
    (stack,) = router_stacks(moe_layers(model))
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(0.2 * torch.randn(*shape, generator=generator) for _ in stack)

    made = DraftExperts(
        random(2 * width, HIDDEN), random(HIDDEN, width), torch.linspace(0.5, 1.0, len(stack))
    )
    write_heads(path, made.tensors(), {"routers": fingerprint(stack)})
    return path


def prompt(seed: int, length: int) -> Request:
    return Request(0, np.random.default_rng((7, seed)).integers(2, 250, length))


def written(passes: list[Pass]) -> dict[int, int]:
    return dict(pair for step in passes for share in step.shares for pair in share.written)


def test_the_stop_rule_needs_doubt_and_growth() -> None:
    rule = Drafting(confidence=0.8, growth=2)
    assert rule.stops(0.79, 3)
    assert not rule.stops(0.8, 3)  # sure enough
    assert not rule.stops(0.1, 2)  # cheap enough


def test_a_state_grows_the_set_by_what_is_new_in_it() -> None:
    """The first state is kept whatever it needs; growth is counted against all kept before."""

    def needs(*experts: int) -> np.ndarray:
        flags = np.zeros((2, 4), dtype=bool)
        flags.ravel()[list(experts)] = True
        return flags

    found = VerifySet(Drafting(confidence=0.5, growth=1))
    assert found.keeps(0.0, needs(0, 1, 2, 3, 4))
    assert found.keeps(0.1, needs(0, 5))  # one more
    assert found.keeps(0.9, needs(0, 6, 7))  # two more, but sure
    assert found.keeps(0.1, needs(5, 6, 7))  # none more
    other = VerifySet(Drafting(confidence=0.5, growth=1))
    assert other.keeps(1.0, needs(0))
    assert not other.keeps(0.49, needs(1, 2))


def test_tokens_count_while_those_before_them_were_drafted() -> None:
    """At 7 the model writes 8, as drafted, then 5, where 9 was drafted: 8 and 5 count."""
    assert tokens_accepted([7, 8, 9, 3], [8, 5, 3, 4]) == 2
    assert tokens_accepted([7, 8, 9], [8, 9, 3]) == 3
    assert tokens_accepted([7, 8], [9, 1]) == 1
    assert tokens_accepted([7], [8]) == 1


def test_steps_count_while_they_lead_where_the_draft_went() -> None:
    def state(*tokens: int) -> State:
        ids = np.array(tokens)
        return State(ids, ids != MASK)

    first, second, third = state(MASK, MASK, MASK), state(MASK, 5, MASK), state(6, 5, MASK)
    drafted = [first, second, third]
    assert steps_accepted(drafted, [second, third, state(6, 5, 7)]) == 3
    assert steps_accepted(drafted, [second, state(MASK, 5, 6), state(6, 5, 7)]) == 2
    assert steps_accepted(drafted, [state(MASK, 4, MASK), third, third]) == 1  # another token
    assert steps_accepted([first], [second]) == 1


@settings(max_examples=sized(6))
@given(
    family=st.sampled_from(["llada2_moe", "sdar_moe"]),
    seed=st.integers(0, 1000),
    length=st.integers(1, 20),
    threshold=st.sampled_from([0.2, 0.9]),
    rule=st.builds(
        Drafting,
        experts=st.none(),
        confidence=st.sampled_from([0.0, 0.5, 1.0]),
        growth=st.integers(0, 8),
        most=st.integers(1, 5),
    ),
)
def test_the_text_of_blocks_is_that_of_plain_decoding(
    family: str, seed: int, length: int, threshold: float, rule: Drafting
) -> None:
    """In double precision, where no decision hangs on rounding; and the same number of steps."""
    model = exact(family)
    values = {**BLOCKS, "threshold": threshold, "max_new_tokens": 12}
    plain = list(BlockDiffusion(**values).decode(model, [prompt(seed, length)]))
    found = list(SpeculativeBlocks(**values, draft=rule).decode(model, [prompt(seed, length)]))
    assert written(found) == written(plain)
    assert produced(found) == produced(plain)
    assert counted(found) == sum(step.phase is Phase.DENOISE for step in plain)


@settings(max_examples=sized(6))
@given(
    family=st.sampled_from(["qwen3_moe", "deepseek_v3"]),
    seed=st.integers(0, 1000),
    length=st.integers(1, 12),
    new=st.integers(0, 12),
    confidence=st.sampled_from([0.0, 0.5, 1.0]),
    most=st.integers(1, 5),
)
def test_the_text_of_tokens_is_that_of_greedy_decoding(
    family: str, seed: int, length: int, new: int, confidence: float, most: int
) -> None:
    model, rule = exact(family), Drafting(None, confidence, 2, most)
    values: dict[str, Any] = {"max_new_tokens": new, "eos_ids": (EOS,)}
    plain = list(Autoregressive(**values).decode(model, [prompt(seed, length)]))
    loop = SpeculativeAutoregressive(**values, draft=rule)
    found = list(loop.decode(model, [prompt(seed, length)]))
    assert written(found) == written(plain)
    assert produced(found) == produced(plain)


def exact(family: str) -> PreTrainedModel:
    model = build(family).double()
    model.set_experts_implementation("eager")
    return model


def produced(passes: list[Pass]) -> int:
    return sum(share.produced for step in passes for share in step.shares)


def counted(passes: list[Pass]) -> int:
    """Steps of the model that counted."""
    return sum(
        int(share.accepted.reshape(-1, 8).any(axis=1).sum())
        for step in passes
        for share in step.shares
        if step.phase is Phase.VERIFY
    )


def test_a_draft_adds_the_best_expert_and_its_own_to_the_shared_one(
    llada: PreTrainedModel, tmp_path: Path
) -> None:
    """The output of each sparse block, put together from the weights."""
    file = draft_file(llada, tmp_path / "draft.safetensors")
    draft = Draft(llada, file)
    assert draft.units == 1
    tensors, _ = read_heads(file)
    blocks = [layer.mlp for layer in llada.model.layers[1:]]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [b.register_forward_hook(lambda _m, i, o: seen.append((i[0], o))) for b in blocks]
    with torch.inference_mode():
        with draft:
            llada(input_ids=torch.randint(2, 250, (1, 5)))
        for row, (block, (x, output)) in enumerate(zip(blocks, seen, strict=True)):
            tokens = x[0]
            _, weights, ids = block.gate(tokens)
            expected = block.shared_experts(tokens)
            for token in range(5):
                best = int(weights[token].argmax())
                expert, weight = int(ids[token, best]), weights[token, best]
                gate_up, down = block.experts.gate_up_proj[expert], block.experts.down_proj[expert]
                gate, up = (gate_up @ tokens[token]).chunk(2)
                expected[token] += weight * (down @ (functional.silu(gate) * up))
                gate, up = (tensors[f"gate_up.{row}"].float() @ tokens[token]).chunk(2)
                own = tensors[f"down.{row}"].float() @ (functional.silu(gate) * up)
                expected[token] += tensors["gamma"][row].float() * own
            torch.testing.assert_close(output[0], expected, rtol=1e-4, atol=1e-5)
            wanted = set(draft.wanted().predictions[row].expert_ids.tolist())
            assert wanted == set(ids.flatten().tolist())
    for hook in hooks:
        hook.remove()
    assert {p.layer for p in draft.wanted().predictions} == {3}  # all said at the last one
    assert [p.target for p in draft.wanted().predictions] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["blocks", "tokens"])
def test_a_recording_holds_drafts_and_what_plain_decoding_would_have_recorded(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Verified states are routed as the forwards of plain decoding; top-1 alone in drafts."""
    model = build("llada2_moe" if kind == "blocks" else "qwen3_moe")
    loaded = LoadedModel("random", model, tokenizer, torch.float32)
    prompts = [plain_prompt("abcde"), plain_prompt("xyz")]
    rule = Drafting(str(draft_file(model, tmp_path / "draft.safetensors")), 0.3, 4, 4)
    plain: Any
    speculative: Any
    if kind == "blocks":
        values = {**BLOCKS, "threshold": 0.5, "max_new_tokens": 16}
        plain, speculative = BlockDiffusion(**values), SpeculativeBlocks(**values, draft=rule)
    else:
        values = {"max_new_tokens": 12, "eos_ids": (EOS,)}
        plain = Autoregressive(**values)
        speculative = SpeculativeAutoregressive(**values, draft=rule)
    record(loaded, prompts, plain, tmp_path / "plain")
    record(loaded, prompts, speculative, tmp_path / "drafted")
    assert check(tmp_path / "drafted").ok
    before, trace = load(tmp_path / "plain"), load(tmp_path / "drafted")
    after = undrafted(trace)
    assert trace.geometry.draft_experts == 1
    assert after.geometry == before.geometry
    for name in ("request", "phase", "block", "step", "tokens", "context", "accepted"):
        ours, theirs = getattr(after.forwards, name), getattr(before.forwards, name)
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert after.forwards.produced.sum() == before.forwards.produced.sum()
    for name in ("position", "token_id", "state", "accepted"):
        ours, theirs = getattr(after.tokens, name), getattr(before.tokens, name)
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    for name in ("forward", "layer", "token", "expert_ids"):
        ours, theirs = getattr(after.routing, name), getattr(before.routing, name)
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    np.testing.assert_allclose(after.routing.weights, before.routing.weights, atol=1e-4)
    drafts = trace.forwards.phase[trace.routing.forward] == Phase.DRAFT
    used = (trace.routing.expert_ids != NO_EXPERT).sum(axis=1)
    assert set(used[drafts]) == {1}
    assert set(used[~drafts]) == {2}
    found = Verifications.of(trace)
    assert found is not None
    assert found.number <= found.steps <= found.states <= found.drafts
    assert trace.predictions is not None
    assert trace.predictions.names == ("draft",)


def test_the_recorder_sees_what_a_draft_executes(llada: PreTrainedModel) -> None:
    draft = Draft(llada, None)
    with Recorder(llada) as recorder, torch.inference_mode():
        with draft:
            llada(input_ids=torch.randint(2, 250, (1, 3)))
        capture = recorder.take(3)
    assert (capture.expert_ids[:, :, 0] >= 0).all()
    assert (capture.expert_ids[:, :, 1] == -1).all()
    assert (capture.weights[:, :, 1] == 0).all()


def test_what_drafts_do_not_go_together_with_is_refused(
    loaded: LoadedModel, qwen: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    blocks = SpeculativeBlocks(**BLOCKS, draft=WIDE)
    prompts = [plain_prompt("a"), plain_prompt("b")]
    with pytest.raises(UserError, match="one prompt at a time"):
        record(loaded, prompts, blocks, tmp_path / "t", batch_size=2)
    with pytest.raises(UserError, match="one prompt at a time"):
        list(blocks.decode(loaded.model, [prompt(0, 3), prompt(1, 3)]))
    with pytest.raises(UserError, match="without drafts"):
        record(loaded, prompts, blocks, tmp_path / "t", reroute=DesVote())
    tokens = SpeculativeAutoregressive(mode=Mode.FORCED, draft=WIDE)
    with pytest.raises(UserError, match="decides every token"):
        tokens.resolve(qwen, tokenizer)
    with pytest.raises(UserError, match="sliding windows"):
        SpeculativeAutoregressive(draft=WIDE).resolve(build("gpt_oss"), tokenizer)
    assert not (tmp_path / "t").exists()


def test_draft_experts_of_another_model_are_refused(llada: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another model; train them"):
        Draft(llada, "bundled")
    broken = tmp_path / "draft.safetensors"
    broken.write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="not a file of draft experts"):
        Draft(llada, broken)
    odd = draft_file(llada, tmp_path / "odd.safetensors", width=24)
    with pytest.raises(UserError, match="24 wide; it must be a multiple"):
        _ = Draft(llada, odd).units


@pytest.mark.parametrize("wrong", [{"confidence": 1.5}, {"growth": -1}, {"most": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"decode\.draft\.{next(iter(wrong))}"):
        Drafting(**wrong)


def test_the_bundled_draft_experts_belong_to_the_bundled_model() -> None:
    """Where not: run experiments/training/train_draft_expert.py and copy what it makes."""
    model = load_model("tiny").model
    (stack,) = router_stacks(moe_layers(model))
    experts = load_draft_experts("bundled", stack)
    assert bundled_drafts().stat().st_size < 1 << 20
    assert len(experts.gamma) == len(stack)
