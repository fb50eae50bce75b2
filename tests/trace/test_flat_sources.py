"""llama.cpp's CSV, generic JSONL, and router logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sources import FACTS, save_safetensors, write_lines

from oled.trace import NO_EXPERT, Kept, Phase, TokenState, TraceError, WeightKind, load
from oled.trace.check import check
from oled.trace.importers import import_trace, read_source


def imported(tmp_path: Path, name: str, source: Path, **options: object):
    folder = tmp_path / "trace"
    trace = load(import_trace(name, source, folder, {**FACTS, **options}))
    report = check(folder)
    assert report.ok, report.lines()
    return trace


# --- llama.cpp ------------------------------------------------------------------------------------


def activations(*passes: dict[int, list[int]]) -> str:
    rows = [f"{layer},{e}" for one in passes for layer, experts in one.items() for e in experts]
    return "\n".join(["layer,expert", *rows]) + "\n"


PROMPT = {1: [0, 1, 2, 3, 4, 5], 2: [7, 6, 5, 4, 3, 2], 3: [1, 7]}  # layer 3: the last token only
TOKEN = {1: [5, 0], 2: [1, 2], 3: [6, 3]}


def test_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(activations(PROMPT, TOKEN, TOKEN))
    trace = imported(tmp_path, "llama_cpp", tmp_path / "t.csv", top_k=2, layers=4)
    assert trace.geometry.moe_layers == (1, 2, 3)
    assert trace.forwards.tokens.tolist() == [3, 1, 1]
    assert trace.forwards.phase.tolist() == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert trace.forwards.context.tolist() == [0, 3, 4]
    assert trace.routing.expert_ids[:4].tolist() == [[0, 1], [2, 3], [4, 5], [7, 6]]
    assert trace.routing.token[:7].tolist() == [0, 1, 2, 0, 1, 2, 2]
    (gap,) = trace.manifest.gaps
    assert (gap.layer, gap.phase, gap.kept) == (3, Phase.PREFILL, Kept.LAST_TOKEN)
    assert set(trace.manifest.lacks) == {"weights", "confidence", "requests", "token_ids"}


def test_llama_cpp_without_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(activations(TOKEN, TOKEN).partition("\n")[2])
    trace = imported(tmp_path, "llama_cpp", tmp_path / "t.csv", top_k=2)
    assert trace.forwards.tokens.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as layer,expert lines"),
        ("layer,expert\n", "not readable as layer,expert|holds no rows"),
        (activations({1: [0, 1]}, {1: [2, 3]}), "1 layers: passes can not be told apart"),
        (activations(PROMPT, {1: [0, 1]}), "the pass at row 15 has 1 of 3 layers: cut off"),
        (activations({1: [0, 1, 2], 2: [0, 1]}), "layer 1: 3 experts are no tokens of top_k=2"),
        (activations({1: [0, 1], 2: [0, 1, 2, 3], 3: [0, 1]}), "layer 2: 4 experts, the layer"),
        (activations({1: [3, 3], 2: [0, 1]}), "token 0 names expert 3 twice: is top_k=2 right"),
        (activations(TOKEN) + "1,x\n", "not readable as layer,expert lines"),
        (activations(TOKEN) + "1\n", "not readable as layer,expert lines"),
        (activations(TOKEN) + "1,\n", "an empty value"),
        (activations(TOKEN) + "-1,2\n", "row 7: layer -1"),
        (activations(TOKEN) + "1,65535\n", "row 7: expert 65535"),
    ],
)
def test_llama_cpp_refusals(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TraceError, match=message):
        import_trace("llama_cpp", tmp_path / "t.csv", tmp_path / "t", FACTS | {"top_k": 2})
    assert not (tmp_path / "t").exists()


def test_llama_cpp_checks_ids_against_the_model(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(activations(TOKEN, {1: [9, 0], 2: [1, 2], 3: [6, 3]}))
    with pytest.raises(TraceError, match="layer 1, token 0: expert id 9 where the layer has 8"):
        import_trace("llama_cpp", tmp_path / "t.csv", tmp_path / "t", FACTS | {"top_k": 2})


# --- JSONL ----------------------------------------------------------------------------------------


def line(layer: int, token: int, ids: list[int], weights: list[float] | None) -> dict:
    found = {"layer_idx": layer, "token_idx": token, "selected_ids": ids, "gate_weights": weights}
    return {key: value for key, value in found.items() if value is not None}


LINES = [line(layer, token, [layer, token], [0.75, 0.25]) for token in (3, 0) for layer in (7, 5)]


def test_jsonl(tmp_path: Path) -> None:
    trace = imported(tmp_path, "jsonl", write_lines(tmp_path / "t.jsonl", LINES), layers=10)
    assert trace.geometry.moe_layers == (5, 7)
    assert trace.geometry.num_layers == 10
    assert trace.forwards.tokens.tolist() == [1, 1]
    assert trace.tokens.position.tolist() == [0, 3]
    assert trace.routing.expert_ids.tolist() == [[5, 0], [7, 0], [5, 3], [7, 3]]
    assert trace.manifest.weight_kind is WeightKind.SUM_ONE
    assert set(trace.manifest.lacks) == {"confidence", "requests", "phases", "token_ids"}


@pytest.mark.parametrize(
    ("weights", "asked", "kind", "total"),
    [
        ([0.5, 0.2], "auto", WeightKind.UNNORMALISED, None),
        ([1.5, 1.0], "2.5", WeightKind.SCALED_SUM, 2.5),
        ([0.6, 0.4], "softmax_selected", WeightKind.SOFTMAX_SELECTED, None),
        ([0.6, 0.4], "none", WeightKind.NONE, None),
        (None, "auto", WeightKind.NONE, None),
    ],
)
def test_jsonl_kinds_of_weight(tmp_path: Path, weights, asked, kind, total) -> None:
    lines = [line(layer, 0, [0, 1], weights) for layer in (0, 1)]
    file = write_lines(tmp_path / "t.jsonl", lines)
    trace = imported(tmp_path, "jsonl", file, weights=asked)
    assert (trace.manifest.weight_kind, trace.manifest.weight_sum) == (kind, total)
    assert ("weights" in trace.manifest.lacks) == (kind is WeightKind.NONE)
    assert bool(trace.routing.weights.any()) == (kind is not WeightKind.NONE)


def test_jsonl_of_uneven_rows_and_declared_gaps(tmp_path: Path) -> None:
    lines = [line(0, 0, [1, 2, 3], None), line(1, 0, [4], None), line(0, 1, [5], None)]
    file = write_lines(tmp_path / "t.jsonl", lines)
    with pytest.raises(TraceError, match="token 1 has no line of layer 1: cut off"):
        read_source("jsonl", file, FACTS)
    trace = imported(tmp_path, "jsonl", file, gaps="true", top_k=4)
    assert trace.routing.expert_ids[1].tolist() == [4, *[NO_EXPERT] * 3]
    assert [(gap.layer, gap.kept) for gap in trace.manifest.gaps] == [(1, Kept.SOME)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no lines"),
        (["{"], "line 1: not readable as JSON"),
        (["[" * 100_000], "line 1: not readable as JSON"),
        (["7"], "line 1: expected a JSON object, found int"),
        ([{"layer_idx": 0}], "line 1: 'selected_ids' is missing"),
        ([line(0, 0, [], None)], "line 1: selected_ids .. hold no expert ids"),
        ([line(0, 0, [-1], None)], "line 1: selected_ids"),
        ([line(0, 0, [70000], None)], "line 1: selected_ids"),
        ([line(70000, 0, [0], None)], "'layer_idx' must be from 0 to 65535"),
        ([line(0, 0, [0, 1], [0.5])], "gate_weights must be 2 numbers"),
        ([line(0, 0, [0], [float("nan")])], "a gate weight is negative or not finite"),
        ([line(0, 0, [0], [1.0]), line(0, 1, [0], None)], "line 2: some lines have gate_weights"),
        ([line(0, 0, [0], None)] * 2, "two lines for layer 0, token 0: several requests"),
    ],
)
def test_jsonl_refusals(tmp_path: Path, lines, message) -> None:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_source("jsonl", tmp_path / "t.jsonl", FACTS)


# --- router logits --------------------------------------------------------------------------------


def logits(tokens: int = 6, seed: int = 0) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {layer: rng.normal(size=(tokens, 8)).astype(np.float32) for layer in (1, 2)}


def reference(values: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights as Qwen3-MoE's router has them."""
    probabilities = torch.softmax(torch.from_numpy(values.astype(np.float32)), dim=-1)
    weights, ids = torch.topk(probabilities, top_k, dim=-1)
    return ids.numpy(), (weights / weights.sum(dim=-1, keepdim=True)).numpy()


def saved(folder: Path, kind: str, tensors: dict[int, np.ndarray]) -> Path:
    """As a model's output has them: a tuple with None for the dense layer 0, or by name."""
    file = folder / f"f0.{kind}"
    named = {f"router_logits.{layer}": value for layer, value in tensors.items()}
    if kind == "pt":
        torch.save((None, *(torch.from_numpy(value) for value in tensors.values())), file)
    elif kind == "npz":
        np.savez(file, **named)
    else:
        save_safetensors(file, named, "F32")
    return file


@pytest.mark.parametrize("kind", ["pt", "npz", "safetensors"])
def test_router_logits(tmp_path: Path, kind: str) -> None:
    tensors = logits()
    trace = imported(tmp_path, "router_logits", saved(tmp_path, kind, tensors), top_k=2, scores=4)
    assert trace.geometry.moe_layers == (1, 2)
    assert trace.manifest.weight_kind is WeightKind.SUM_ONE
    assert "applied_routing" in trace.manifest.lacks
    for layer, values in tensors.items():
        ids, weights = reference(values, 2)
        here = trace.routing.layer == layer
        np.testing.assert_array_equal(trace.routing.expert_ids[here], ids)
        np.testing.assert_allclose(trace.routing.weights[here], weights, rtol=1e-5)
    assert trace.scores is not None
    assert trace.scores.values.shape == (12, 4)


def test_router_logits_of_a_padded_batch(tmp_path: Path) -> None:
    """Two rows of 3 tokens, one of them padded on the left, then a token each."""
    mask = np.array([[1, 1, 1], [0, 1, 1]])
    folder = tmp_path / "steps"
    folder.mkdir()
    first = {"router_logits": [None, *map(torch.from_numpy, logits(6).values())]}
    second = {"router_logits": [None, *map(torch.from_numpy, logits(2, 1).values())]}
    grown = np.concatenate([mask, [[1], [1]]], axis=1)
    torch.save(first | {"attention_mask": torch.from_numpy(mask)}, folder / "0.pt")
    torch.save(second | {"attention_mask": torch.from_numpy(grown)}, folder / "1.pt")
    trace = imported(tmp_path, "router_logits", folder, top_k=2)
    assert trace.forwards.request.tolist() == [0, 1, 0, 1]
    assert trace.forwards.pass_id.tolist() == [0, 0, 1, 1]
    assert trace.forwards.phase.tolist() == [Phase.PREFILL] * 2 + [Phase.DECODE] * 2
    assert trace.forwards.context.tolist() == [0, 0, 3, 2]
    assert trace.tokens.state.tolist()[3] == TokenState.PAD
    assert trace.tokens.position.tolist() == [0, 1, 2, 0, 0, 1, 3, 2]
    assert len(trace.routing.forward) == (3 + 2 + 1 + 1) * 2


def test_bfloat16_logits(tmp_path: Path) -> None:
    tensors = {layer: torch.from_numpy(value).bfloat16() for layer, value in logits().items()}
    torch.save((None, *tensors.values()), tmp_path / "a.pt")
    raw = {f"l{n}": t.view(torch.int16).numpy() for n, t in tensors.items()}
    save_safetensors(tmp_path / "a.safetensors", raw, "BF16")
    found = [
        imported(tmp_path / kind, "router_logits", tmp_path / f"a.{kind}", top_k=2)
        for kind in ("pt", "safetensors")
    ]
    np.testing.assert_array_equal(found[0].routing.expert_ids, found[1].routing.expert_ids)
    np.testing.assert_array_equal(found[0].routing.weights, found[1].routing.weights)


@pytest.mark.parametrize(
    ("options", "kind", "total"),
    [
        ({"normalise": "false"}, WeightKind.UNNORMALISED, None),
        ({"scale": 2.5, "scoring": "sigmoid"}, WeightKind.SCALED_SUM, 2.5),
        ({"scoring": "selected"}, WeightKind.SOFTMAX_SELECTED, None),
    ],
)
def test_router_logits_kinds_of_weight(tmp_path: Path, options, kind, total) -> None:
    """G02: [1, 0, 0, 0] without normalisation gives .4754 and .1749."""
    values = np.zeros((1, 4), dtype=np.float32)
    values[0, 0] = 1
    np.savez(tmp_path / "a.npz", layer_1=values)
    facts = {"experts": 4, "expert_bytes": 1, "top_k": 2, "moe_layers": 1, "layers": 2}
    trace = load(import_trace("router_logits", tmp_path / "a.npz", tmp_path / "t", facts | options))
    assert check(tmp_path / "t").ok
    assert (trace.manifest.weight_kind, trace.manifest.weight_sum) == (kind, total)
    if kind is WeightKind.UNNORMALISED:
        np.testing.assert_allclose(trace.routing.weights, [[0.4754, 0.1749]], atol=1e-4)
    if kind is WeightKind.SOFTMAX_SELECTED:
        np.testing.assert_allclose(trace.routing.weights, [[0.7311, 0.2689]], atol=1e-4)


def test_probabilities_must_be_named_and_named_truly(tmp_path: Path) -> None:
    probabilities = torch.softmax(torch.from_numpy(logits()[1]), dim=-1).numpy()
    np.savez(tmp_path / "a.npz", layer_0=probabilities)
    with pytest.raises(TraceError, match="these are probabilities already: say softmaxed=true"):
        import_trace("router_logits", tmp_path / "a.npz", tmp_path / "t", FACTS | {"top_k": 2})
    trace = imported(tmp_path, "router_logits", tmp_path / "a.npz", top_k=2, softmaxed="true")
    np.testing.assert_array_equal(trace.routing.expert_ids, reference(logits()[1], 2)[0])
    np.savez(tmp_path / "b.npz", layer_0=logits()[1])
    options = FACTS | {"top_k": 2, "softmaxed": "true"}
    with pytest.raises(TraceError, match="these are no probabilities"):
        import_trace("router_logits", tmp_path / "b.npz", tmp_path / "u", options)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([None], "holds no logits"),
        ({"router_logits": 7}, "7 is no list of layers"),
        ([torch.zeros(2, 8, dtype=torch.int64)], "is no tensor of floating-point numbers"),
        ([torch.randn(2, 8), torch.randn(3, 8)], "layers differ in their number of tokens"),
        ([torch.randn(2, 2, 2, 8)], "has shape"),
        ([torch.full((2, 8), float("nan"))], "layer 0: token 0, expert 0: nan"),
        ({"a": torch.randn(2, 8)}, "'a' names no layer"),
        ({"router_logits": [torch.randn(5, 8)], "attention_mask": torch.ones(2, 3)}, "whole"),
        ({"router_logits": [torch.randn(5, 8)], "attention_mask": torch.ones(2, 3).int()}, "5 tok"),
        ([torch.randn(2, 9)], "experts: 8 experts of a layer were named, the recording has 9"),
    ],
)
def test_router_logits_refusals(tmp_path: Path, value, message) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(TraceError, match=message):
        import_trace("router_logits", tmp_path / "a.pt", tmp_path / "t", FACTS | {"top_k": 2})
