"""DiffusionGemma: canvases as its own `generate` draws them, through two stacks of layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSamplerConfig,
)

from oled.errors import UserError
from oled.record import (
    Autoregressive,
    BlockDiffusion,
    CanvasDiffusion,
    LoadedModel,
    Recorder,
    plain_prompt,
    record,
)
from oled.running.decode import Pass, Request, Share
from oled.running.modules import moe_layers
from oled.trace.check import check
from oled.trace.reader import load
from oled.trace.schema import Phase, TokenState, WeightKind

from .conftest import CONFIGS, EOS, build

C = 8


@pytest.fixture
def gemma() -> PreTrainedModel:
    return build("diffusion_gemma")


def prompt(index: int, length: int) -> Request:
    return Request(index, np.random.default_rng((7, index)).integers(2, 250, length), seed=index)


def canvases(**settings: object) -> CanvasDiffusion:
    values = {"max_new_tokens": 20, "canvas_length": C, "max_denoising_steps": 5, **settings}
    return CanvasDiffusion(**{"eos_ids": (), "entropy_bound": 3.0, **values})


def shares(passes: list[Pass], request: int, phase: Phase) -> list[Share]:
    found = [(step.phase, share) for step in passes for share in step.shares]
    return [share for kind, share in found if share.request == request and kind is phase]


def text(passes: list[Pass], request: int = 0) -> list[int]:
    """The tokens that the passes decided, in order."""
    decided = dict(
        pair for step in passes for s in step.shares if s.request == request for pair in s.written
    )
    return [decided[position] for position in sorted(decided)]


@pytest.mark.parametrize(
    ("seed", "bound", "threshold"),
    [(3, 3.0, 0.005), (4, 40.0, 0.005), (5, 3.0, 9.0), (6, 0.1, 9.0)],
)
def test_the_tokens_are_those_of_generate(
    gemma: PreTrainedModel, seed: int, bound: float, threshold: float
) -> None:
    request = prompt(seed, 11)
    passes = list(
        canvases(entropy_bound=bound, confidence_threshold=threshold).decode(gemma, [request])
    )
    torch.manual_seed(seed)
    expected = gemma.generate(
        torch.from_numpy(request.prompt)[None],
        max_new_tokens=20,
        max_denoising_steps=5,
        sampler_config=EntropyBoundSamplerConfig(bound),
        confidence_threshold=threshold,
        eos_token_id=None,
    )
    assert text(passes, seed) == expected.sequences[0, 11:].tolist()
    steps = shares(passes, seed, Phase.DENOISE)
    assert len(steps) == round(24 / float(expected.tokens_per_forward[0]))


def test_a_batch_decodes_as_each_row_alone(gemma: PreTrainedModel) -> None:
    requests = [prompt(0, 3), prompt(1, 21), prompt(2, 8)]
    decode = canvases(confidence_threshold=5.0, stability_threshold=0)
    together = list(decode.decode(gemma, requests))
    for request in requests:
        alone = list(decode.decode(gemma, [request]))
        assert text(together, request.index) == text(alone, request.index)
        for phase in Phase:
            ours, own = shares(together, request.index, phase), shares(alone, request.index, phase)
            assert len(ours) == len(own)
            for a, b in zip(ours, own, strict=True):
                assert np.array_equal(a.token_ids, b.token_ids)
                assert np.allclose(a.confidence, b.confidence, atol=1e-4, equal_nan=True)


def test_a_canvas_opens_closes_again_and_is_whole_at_its_end(gemma: PreTrainedModel) -> None:
    passes = list(canvases().decode(gemma, [prompt(0, 11)]))
    phases = [step.phase for step in passes]
    denoise = [Phase.DENOISE] * 5
    assert phases == [Phase.PREFILL, *denoise, Phase.COMMIT, *denoise, Phase.COMMIT, *denoise]
    steps = shares(passes, 0, Phase.DENOISE)
    closed = 0
    for block in range(3):
        canvas = [share for share in steps if share.block == block]
        assert (np.sum([share.accepted for share in canvas], axis=0) == 1).all()  # once each
        assert (canvas[0].state == TokenState.MASKED).all()
        ever = np.zeros(C, dtype=bool)
        for share in canvas:
            masked = share.state == TokenState.MASKED
            assert not (~masked & ~ever).any()
            closed += int((masked & ever).sum())  # noise again, after it had been accepted
            ever |= share.accepted
    assert closed
    assert [share.block for share in steps] == [0] * 5 + [1] * 5 + [2] * 5
    assert [share.produced for share in steps if share.produced] == [8, 8, 4]
    for commit, last in zip(shares(passes, 0, Phase.COMMIT), (steps[4], steps[9]), strict=True):
        assert (commit.state == TokenState.DECODED).all()
        assert np.array_equal(commit.confidence, last.confidence)


def test_an_end_token_stops_after_its_canvas(gemma: PreTrainedModel) -> None:
    request = prompt(0, 11)
    end = text(list(canvases().decode(gemma, [request])))[10]
    passes = list(canvases(eos_ids=(end,)).decode(gemma, [request]))
    written = text(passes)
    assert len(written) == (C if end in written[:C] else 2 * C)
    produced = sum(share.produced for share in shares(passes, 0, Phase.DENOISE))
    assert produced == written.index(end) + 1


def test_a_prompt_alone_is_read_to_its_last_token(gemma: PreTrainedModel) -> None:
    (step,) = canvases(max_new_tokens=0).decode(gemma, [prompt(0, 5)])
    assert (step.phase, step.shares[0].positions.tolist()) == (Phase.PREFILL, [0, 1, 2, 3, 4])


def test_both_stacks_are_recorded_as_one_set_of_layers(gemma: PreTrainedModel) -> None:
    layers = moe_layers(gemma)
    assert [len(entry.modules) for entry in layers] == [2] * 4
    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for entry in layers:
        for place in entry.modules:

            def look(_m, _i, output, name=place.name) -> None:
                seen.append((name, output[1].numpy().copy(), output[2].numpy().copy()))

            place.router.register_forward_hook(look)
    with Recorder(gemma, score_width=8, horizons=2) as recorder:
        for step in canvases(max_new_tokens=12).decode(gemma, [prompt(0, 11)]):
            used = [one for one in seen if len(one[2]) == step.num_tokens]
            capture = recorder.take(step.num_tokens)
            stack = "decoder" if step.phase is Phase.DENOISE else "encoder"
            assert [name.split(".")[1] for name, _, _ in used] == [stack] * 4
            assert np.array_equal(capture.expert_ids, np.stack([ids for _, _, ids in used]))
            assert np.array_equal(capture.weights, np.stack([w for _, w, _ in used]))
            seen.clear()


def test_a_recording_is_a_complete_trace(
    gemma: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    loaded = LoadedModel("gemma", gemma, tokenizer, torch.bfloat16)
    prompts = [plain_prompt("How many pears?"), plain_prompt("Trip")]
    decode = canvases(canvas_length=None, eos_ids=None)
    for name in ("a", "b"):
        record(loaded, prompts, decode, tmp_path / name, batch_size=2, horizons=4, score_width=3)
    trace = load(tmp_path / "a", verify=True)
    assert check(tmp_path / "a").ok
    assert trace.hash == load(tmp_path / "b").hash
    assert trace.geometry.moe_layers == (0, 1, 2, 3)
    assert (trace.geometry.shared_experts, trace.geometry.top_k) == (3, 2)
    assert trace.manifest.weight_kind is WeightKind.UNNORMALISED
    assert trace.manifest.decode["kind"] == "canvas_diffusion"
    assert (trace.manifest.decode["canvas_length"], trace.manifest.decode["eos_ids"]) == (C, [EOS])
    other = record(loaded, prompts, decode, tmp_path / "c", seed=1)
    assert load(other.path).hash != trace.hash


def test_each_model_has_its_loop(
    gemma: PreTrainedModel, qwen: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    for decode in (Autoregressive(), BlockDiffusion(block_length=4, mask_id=1)):
        with pytest.raises(UserError, match="use decode=canvas_diffusion"):
            decode.resolve(gemma, tokenizer)
    with pytest.raises(UserError, match="'qwen3_moe' denoises no canvas"):
        CanvasDiffusion().resolve(qwen, tokenizer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": -1},
        {"canvas_length": 1},
        {"max_denoising_steps": 0},
        {"entropy_bound": -0.1},
        {"t_min": 0.0},
        {"t_min": 0.9},
        {"stability_threshold": -1},
    ],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    (key,) = wrong
    with pytest.raises(UserError, match=f"decode.{key} is"):
        CanvasDiffusion(**wrong)


def test_stacks_with_weights_of_their_own_are_refused() -> None:
    config = CONFIGS["diffusion_gemma"]()
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"layer 0 has two sets of experts, model\.encoder\."):
        moe_layers(model)
