"""Trained predictors: what they say, when it is recorded, and which files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from oled.errors import UserError
from oled.live.surrogates import Surrogates
from oled.record import Autoregressive, LoadedModel, Recorder, plain_prompt, record
from oled.running.families import Scoring, read_family
from oled.running.loading import load_model
from oled.running.modules import moe_layers, router_stacks
from oled.running.predictors import (
    CrossLayerDrafts,
    RouterHeads,
    bundled_heads,
    fingerprint,
    read_heads,
    trained_predictors,
    write_heads,
)
from oled.trace import load
from oled.trace.check import check
from oled.trace.steps import build_steps, coming_scores

from .conftest import build

HIDDEN, EXPERTS, RANK, TOP_K = 32, 8, 3, 2


def heads_file(model: PreTrainedModel, path: Path) -> Path:
    """Random heads for the model."""
    (stack,) = router_stacks(moe_layers(model))
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"sharpness": torch.full((len(stack) - 1,), 2.0)}
    for row in range(len(stack)):
        for kind in ("temporal", "spatial"):
            tensors[f"{kind}.{row}"] = random(EXPERTS, HIDDEN)
            tensors[f"{kind}_bias.{row}"] = random(EXPERTS)
        if row < len(stack) - 1:
            tensors[f"down.{row}"] = 0.1 * random(RANK, HIDDEN)
            tensors[f"up.{row}"] = 0.1 * random(HIDDEN, RANK)
    write_heads(path, tensors, {"routers": fingerprint(stack)})
    return path


@pytest.fixture
def qwen() -> PreTrainedModel:
    return build("qwen3_moe")


def inputs_of_routers(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Gate inputs [N, h] of every MoE layer, seen by plain hooks."""
    seen: list[torch.Tensor] = []
    handles = [
        entry.modules[0].router.register_forward_hook(lambda _m, i, _o: seen.append(i[0]))
        for entry in moe_layers(model)
    ]
    with torch.inference_mode():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return seen


def test_what_heads_say_by_definition(qwen: PreTrainedModel, tmp_path: Path) -> None:
    """Sums over tokens of softmax(W x + b), kept for the two best of each token; spatial heads
    belong to the layer that they predict, the first layer's sits on the last one."""
    file = heads_file(qwen, tmp_path / "heads.safetensors")
    tensors, _ = read_heads(file)
    ids = torch.randint(2, 250, (1, 7), generator=torch.Generator().manual_seed(1))
    hidden = inputs_of_routers(qwen, ids)
    with Recorder(qwen, heads=file) as recorder, torch.inference_mode():
        qwen(input_ids=ids)
        found = recorder.take(7).predictions(np.arange(7))
    layers = [1, 2, 3]  # layer 0 is dense
    said = {(p.predictor, p.layer, p.target): p for p in found}
    expected = {("future_router", a, a) for a in layers}
    expected |= {("future_router", 1, 2), ("future_router", 2, 3), ("future_router", 3, 1)}
    expected |= {("spice", 1, 2), ("spice", 1, 3), ("spice", 2, 3)}
    assert set(said) == expected
    for (name, layer, target), one in said.items():
        if name == "spice":
            continue
        kind, row = ("temporal" if target == layer else "spatial"), target - 1
        logits = hidden[layer - 1] @ tensors[f"{kind}.{row}"].float().T
        values = (logits + tensors[f"{kind}_bias.{row}"].float()).softmax(-1)
        best = values.topk(TOP_K, dim=-1)
        total = torch.zeros(7, EXPERTS).scatter(1, best.indices, best.values).sum(0).numpy()
        order = np.argsort(-total, kind="stable")[: len(one.expert_ids)]
        assert one.expert_ids.tolist() == order.tolist()
        np.testing.assert_allclose(one.scores, total[order], rtol=1e-5)


def test_what_drafts_say_by_definition(qwen: PreTrainedModel, tmp_path: Path) -> None:
    """Two layers on: the second hop starts from where the first one led."""
    file = heads_file(qwen, tmp_path / "heads.safetensors")
    tensors, _ = read_heads(file)
    (stack,) = router_stacks(moe_layers(qwen))
    _, drafts = trained_predictors(file, stack, read_family(qwen.config), TOP_K)
    assert isinstance(drafts, CrossLayerDrafts)
    z = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        said = list(drafts.predict(stack, 0, z))
        for hop in range(2):
            down, up = (tensors[f"{name}.{hop}"].float() for name in ("down", "up"))
            z = z + torch.einsum("hr,rd,nd->nh", up, down, z)
            _, _, chosen = stack[hop + 1].forward(z)
            raw = z @ stack[hop + 1].weight.T
            ahead, ids, values = said[hop]
            assert ahead == hop + 1
            assert torch.equal(ids, chosen)
            expected = (2.0 * raw).softmax(-1).gather(1, chosen)
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)
    assert len(said) == 2
    assert not list(drafts.predict(stack, 2, z))


def test_a_sigmoid_router_gets_independent_probabilities() -> None:
    weight, bias = torch.eye(3), torch.tensor([0.0, 1.0, -1.0])
    heads = RouterHeads(((weight, bias),), ((weight, bias),), Scoring.SIGMOID, 2)
    ((ahead, ids, values),) = heads.predict(
        [torch.nn.Identity()], 0, torch.tensor([[1.0, 0.5, 0.0]])
    )
    assert ahead == 1  # the only layer there is, in the next forward
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(values, torch.tensor([[1.5, 1.0]]).sigmoid())


def test_a_recording_with_heads_is_whole_and_has_the_next_forward(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = build("qwen3_moe")
    file = heads_file(model, tmp_path / "heads.safetensors")
    loaded = LoadedModel("qwen", model, tokenizer, torch.float32)
    decode = Autoregressive(max_new_tokens=4, eos_ids=())
    record(loaded, [plain_prompt("abc")], decode, tmp_path / "t", heads=file, horizons=1)
    assert check(tmp_path / "t").ok
    trace = load(tmp_path / "t")
    assert trace.predictions is not None
    assert trace.predictions.names == ("next_gate", "future_router", "spice")
    assert trace.manifest.provenance["predictors"] == ["next_gate", "future_router", "spice"]
    steps = build_steps(trace, predictor="future_router")
    assert steps.horizons == 3
    coming = coming_scores(steps)
    assert ((coming > 0).sum(axis=1) >= TOP_K).all()
    assert (coming.sum(axis=1) <= 1.0 + 1e-6).all()  # means of probabilities


def test_heads_of_another_model_are_refused(qwen: PreTrainedModel, tmp_path: Path) -> None:
    file = heads_file(build("olmoe"), tmp_path / "heads.safetensors")
    with pytest.raises(UserError, match="another model; train them"):
        Recorder(qwen, heads=file)


def test_a_file_that_holds_no_heads_is_refused(qwen: PreTrainedModel, tmp_path: Path) -> None:
    broken = tmp_path / "heads.safetensors"
    broken.write_bytes(b"no safetensors")
    for file in (broken, tmp_path / "absent"):
        with pytest.raises(UserError, match="not a file of heads"):
            Recorder(qwen, heads=file)


def test_the_bundled_heads_belong_to_the_bundled_model() -> None:
    """Where not: run experiments/training/train_predictors.py and copy what it makes."""
    model = load_model("tiny").model
    (stack,) = router_stacks(moe_layers(model))
    _, card = read_heads(bundled_heads())
    assert card["routers"] == fingerprint(stack)
    trained_predictors("bundled", stack, read_family(model.config), 4)
    Surrogates.load("bundled", moe_layers(model), "cpu")
    assert all(missed < 0.9 for missed in card["held_out"]["surrogates_miss"])
