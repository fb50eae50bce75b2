"""The decoding loops: what is run when, who has a share in it, and what counts as produced."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from oled.errors import UserError
from oled.record import Autoregressive, BlockDiffusion, Mode, Recorder
from oled.running.decode import Pass, Request, Share
from oled.trace.schema import Phase, TokenState

from .conftest import CONFIGS, EOS, MASK, build

L = 8
DIFFUSION = {"llada2_moe", "sdar_moe", "diffusion_gemma"}
AUTOREGRESSIVE = sorted(set(CONFIGS) - DIFFUSION)


def prompt(index: int, length: int, reference: list[int] | None = None) -> Request:
    ids = np.random.default_rng((7, index)).integers(2, 250, length)
    return Request(index, ids, None if reference is None else np.array(reference))


def diffusion(**settings: object) -> BlockDiffusion:
    values = {"block_length": L, "threshold": 0.5, "max_new_tokens": 20, **settings}
    return BlockDiffusion(**{"mask_id": MASK, "eos_ids": (EOS,), **values})


def shares(passes: list[Pass], request: int, phase: Phase) -> list[Share]:
    found = [(step.phase, share) for step in passes for share in step.shares]
    return [share for kind, share in found if share.request == request and kind is phase]


def output(passes: list[Pass], request: int) -> dict[int, int]:
    """Token by position, as the last pass over it saw it."""
    seen: dict[int, int] = {}
    for step in passes:
        for share in step.shares:
            if share.request == request:
                seen.update(zip(share.positions.tolist(), share.token_ids.tolist(), strict=True))
    return seen


def block_mask(length: int) -> torch.Tensor:
    block = torch.arange(length) // L
    visible = block[None] <= block[:, None]
    mask = torch.zeros(length, length).masked_fill(~visible, torch.finfo(torch.float32).min)
    return mask[None, None]


@pytest.mark.parametrize("family", ["llada2_moe", "qwen3_moe", "sdar_moe"])
def test_a_cached_block_sees_what_the_full_forward_sees(family: str) -> None:
    model, request = build(family), prompt(0, 19)
    passes = list(diffusion(max_new_tokens=13).decode(model, [request]))
    for number, step in enumerate(passes[1:], start=1):
        share = step.shares[0]
        tokens = np.concatenate((request.prompt, np.zeros(13, dtype=np.int64)))
        before = output(passes[:number], 0)
        for position in range(share.positions[0]):
            tokens[position] = before[position]
        tokens[share.positions] = share.token_ids
        length = share.positions[-1] + 1
        with torch.inference_mode():
            logits = model(
                input_ids=torch.from_numpy(tokens[None, :length]),
                attention_mask=block_mask(length),
                position_ids=torch.arange(length)[None],
                cache=DynamicCache(config=model.config),
            ).logits[0, share.positions]
            logits[:, MASK] = -torch.inf
        assert np.allclose(share.confidence, logits.softmax(-1).max(-1).values, atol=1e-4)


@pytest.mark.parametrize("family", ["llada2_moe", "qwen3_moe", "sdar_moe"])
def test_a_batch_decodes_as_each_row_alone(family: str) -> None:
    """G03: prompts of different lengths, padded on the left, share a batch."""
    model, decode = build(family), diffusion()
    requests = [prompt(0, 3), prompt(1, 26), prompt(2, 8), prompt(3, 13)]
    together = list(decode.decode(model, requests))
    for request in requests:
        alone = list(decode.decode(model, [request]))
        assert output(together, request.index) == output(alone, request.index)
        for phase in Phase:
            ours, own = shares(together, request.index, phase), shares(alone, request.index, phase)
            assert len(ours) == len(own)
            for a, b in zip(ours, own, strict=True):
                assert np.array_equal(a.positions, b.positions)
                assert np.allclose(a.confidence, b.confidence, atol=1e-4, equal_nan=True)
                assert (a.produced, a.context) == (b.produced, b.context)


@pytest.mark.parametrize("loop", ["block_diffusion", "autoregressive"])
def test_pads_have_no_rows(loop: str, qwen: PreTrainedModel) -> None:
    """G03: left-padded batch, lengths 3 and 8, k = 2, 3 MoE layers: 66 real routes."""
    decode = (
        diffusion(max_new_tokens=0)
        if loop == "block_diffusion"
        else Autoregressive(max_new_tokens=0, eos_ids=())
    )
    requests = [prompt(0, 3), prompt(1, 8)]
    with Recorder(qwen) as recorder:
        (step,) = decode.decode(qwen, requests)
        capture = recorder.take(step.num_tokens)
    assert step.num_tokens == 16
    routes = [capture.expert_ids[:, share.tokens] for share in step.shares]
    assert [ids.shape for ids in routes] == [(3, 3, 2), (3, 8, 2)]
    assert sum(ids.size for ids in routes) == 66
    for share, ids in zip(step.shares, routes, strict=True):
        with Recorder(qwen) as recorder:
            (alone,) = decode.decode(qwen, [requests[share.request]])
            assert np.array_equal(recorder.take(alone.num_tokens).expert_ids, ids)


def test_rows_end_at_different_steps(llada: PreTrainedModel) -> None:
    """G04: row 0 has 3 tokens to open in its block, row 1 has 7."""
    decode = diffusion(max_new_tokens=3, tokens_per_forward=1)
    passes = list(decode.decode(llada, [prompt(0, 5), prompt(1, 1)]))
    blocks = [step for step in passes if step.phase is Phase.DENOISE]
    assert [len(step.shares) for step in blocks] == [2, 2, 2, 1, 1, 1, 1]
    assert [share.step for share in shares(passes, 0, Phase.DENOISE)] == [0, 1, 2]
    assert [share.step for share in shares(passes, 1, Phase.DENOISE)] == list(range(7))
    assert len(passes[-1].shares) == 2
    assert passes[-1].phase is Phase.COMMIT


def test_a_prompt_is_prefilled_to_its_last_token(llada: PreTrainedModel) -> None:
    """G08: no new tokens, a prompt of 5."""
    (step,) = diffusion(max_new_tokens=0).decode(llada, [prompt(0, 5)])
    (share,) = step.shares
    assert step.phase is Phase.PREFILL
    assert share.positions.tolist() == [0, 1, 2, 3, 4]
    assert (share.state == TokenState.PROMPT).all()


def test_blocks_are_aligned_to_absolute_positions(llada: PreTrainedModel) -> None:
    passes = list(diffusion(max_new_tokens=14).decode(llada, [prompt(0, 19)]))
    (prefill,) = shares(passes, 0, Phase.PREFILL)
    assert len(prefill.positions) == 16
    first = shares(passes, 0, Phase.DENOISE)[0]
    assert first.positions.tolist() == list(range(16, 24))
    assert first.state.tolist() == [TokenState.PROMPT] * 3 + [TokenState.MASKED] * 5
    assert first.token_ids[3:].tolist() == [MASK] * 5
    commits = shares(passes, 0, Phase.COMMIT)
    assert [share.block for share in commits] == [2, 3, 4]
    assert [share.context for share in commits] == [16, 24, 32]
    assert MASK not in output(passes, 0).values()


def test_acceptance_follows_the_threshold(llada: PreTrainedModel) -> None:
    counts = set()
    for threshold in (0.0, 0.3, 1.0):
        for share in shares(
            list(diffusion(threshold=threshold).decode(llada, [prompt(0, 9)])), 0, Phase.DENOISE
        ):
            masked = share.state == TokenState.MASKED
            above = masked & (share.confidence > threshold)
            expected = above if above.any() else share.confidence == share.confidence[masked].max()
            assert np.array_equal(share.accepted, expected & masked)
            counts.add(int(share.accepted.sum()))
    assert {1, L} <= counts


def test_every_position_has_a_confidence_but_in_prefill(llada: PreTrainedModel) -> None:
    passes = list(diffusion().decode(llada, [prompt(0, 11)]))
    assert np.isnan(shares(passes, 0, Phase.PREFILL)[0].confidence).all()
    for phase in (Phase.DENOISE, Phase.COMMIT):
        for share in shares(passes, 0, phase):
            assert ((share.confidence > 0) & (share.confidence <= 1)).all()


def test_forced_writes_the_reference_where_the_model_chooses(llada: PreTrainedModel) -> None:
    reference = list(range(50, 61))
    decode = diffusion(mode=Mode.FORCED, tokens_per_forward=2)
    passes = list(decode.decode(llada, [prompt(0, 10, reference)]))
    written = output(passes, 0)
    assert [written[position] for position in range(10, 21)] == reference
    assert [written[position] for position in range(21, 24)] == [EOS] * 3
    steps = shares(passes, 0, Phase.DENOISE)
    assert [int(share.accepted.sum()) for share in steps] == [2] * 3 + [2] * 4
    for share in steps:
        masked = share.state == TokenState.MASKED
        rest = masked & ~share.accepted
        assert (
            not rest.any() or share.confidence[rest].max() <= share.confidence[share.accepted].min()
        )
    assert sum(share.produced for share in steps) == len(reference) + 1
    assert len(shares(passes, 0, Phase.COMMIT)) == 2


def test_forced_stops_at_the_limit_inside_the_reference(llada: PreTrainedModel) -> None:
    decode = diffusion(mode=Mode.FORCED, max_new_tokens=6)
    passes = list(decode.decode(llada, [prompt(0, 8, list(range(50, 90)))]))
    assert sum(share.produced for share in shares(passes, 0, Phase.DENOISE)) == 6


def test_forced_without_a_reference_is_refused(llada: PreTrainedModel) -> None:
    with pytest.raises(UserError, match="prompt 4 has no reference"):
        list(diffusion(mode=Mode.FORCED).decode(llada, [prompt(4, 8)]))


def test_an_end_token_stops_after_its_block(llada: PreTrainedModel) -> None:
    request = prompt(0, 12)
    free = output(list(diffusion(max_new_tokens=36).decode(llada, [request])), 0)
    end = free[22]  # the third block that is generated
    first = min(position for position in range(12, 48) if free[position] == end)
    passes = list(diffusion(max_new_tokens=36, eos_ids=(end,)).decode(llada, [request]))
    assert sum(share.produced for share in shares(passes, 0, Phase.DENOISE)) == first - 12 + 1
    assert max(output(passes, 0)) == first // L * L + L - 1


def test_a_finished_row_leaves_the_batch(llada: PreTrainedModel) -> None:
    decode = diffusion(mode=Mode.FORCED)
    requests = [prompt(0, 9, [50]), prompt(1, 21, list(range(60, 80)))]
    passes = list(decode.decode(llada, requests))
    assert [len(step.shares) for step in passes if step.phase is Phase.COMMIT] == [2, 1, 1, 1]
    assert passes[-1].num_tokens == L
    alone = list(decode.decode(llada, requests[1:]))
    assert output(passes, 1) == output(alone, 1)


def test_the_mask_is_never_chosen(llada: PreTrainedModel) -> None:
    favourite = output(list(diffusion().decode(llada, [prompt(0, 9)])), 0)[9]
    passes = list(diffusion(mask_id=favourite).decode(llada, [prompt(0, 9)]))
    last = shares(passes, 0, Phase.COMMIT)[0]
    assert favourite not in last.token_ids[1:]


@pytest.mark.parametrize("family", AUTOREGRESSIVE)
def test_autoregressive_is_greedy_generation(family: str) -> None:
    model, requests = build(family), [prompt(0, 4), prompt(1, 11)]
    decode = Autoregressive(max_new_tokens=10, eos_ids=(EOS,))
    passes = list(decode.decode(model, requests))
    for request in requests:
        ids = torch.from_numpy(request.prompt)[None]
        expected = model.generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=EOS)[0]
        seen = output(passes, request.index)
        assert [seen[p] for p in sorted(seen)] == expected[: len(seen)].tolist()
        assert len(seen) == len(expected) - 1  # the last token is never run
        decodes = shares(passes, request.index, Phase.DECODE)
        assert sum(share.produced for share in decodes) == len(expected) - len(request.prompt) - 1


@pytest.mark.parametrize("family", AUTOREGRESSIVE)
def test_autoregressive_confidence_is_the_chosen_tokens(family: str) -> None:
    model = build(family)
    passes = list(Autoregressive(max_new_tokens=4, eos_ids=()).decode(model, [prompt(0, 6)]))
    (prefill,) = shares(passes, 0, Phase.PREFILL)
    assert np.isnan(prefill.confidence).tolist() == [True] * 5 + [False]
    assert prefill.accepted.tolist() == [False] * 5 + [True]
    assert prefill.produced == 0
    tokens = np.concatenate([share.token_ids for step in passes for share in step.shares])
    with torch.inference_mode():
        chances = model(torch.from_numpy(tokens[None])).logits[0, 5:].softmax(-1)
    said = [share.confidence[-1] for step in passes for share in step.shares]
    chosen = [token for step in passes for share in step.shares for _, token in share.written]
    assert np.allclose(said, chances[range(4), chosen], atol=1e-4)
    assert np.allclose(said, chances.max(-1).values, atol=1e-4)


def test_settings_find_their_token_ids(
    llada: PreTrainedModel, qwen: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = BlockDiffusion().resolve(llada, tokenizer)
    assert (settings.mask_id, settings.eos_ids) == (MASK, (EOS,))
    assert BlockDiffusion(mask_id=9, eos_ids=(7,)).resolve(llada, tokenizer).eos_ids == (7,)
    assert Autoregressive().resolve(qwen, tokenizer).eos_ids == (EOS,)
    assert settings.block_length == llada.config.block_length == 32
    assert BlockDiffusion(block_length=4).resolve(llada, tokenizer).block_length == 4
    with pytest.raises(UserError, match=r"names no length of a block: give decode\.block_length"):
        BlockDiffusion(mask_id=9).resolve(qwen, tokenizer)
    with pytest.raises(UserError, match="does not decode token by token"):
        Autoregressive().resolve(llada, tokenizer)
    maskless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match="names a mask token"):
        BlockDiffusion().resolve(qwen, maskless)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_length": 1},
        {"threshold": 1.5},
        {"max_new_tokens": -1},
        {"tokens_per_forward": 0},
    ],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    (key,) = wrong
    with pytest.raises(UserError, match=f"decode.{key} is"):
        BlockDiffusion(**wrong)
