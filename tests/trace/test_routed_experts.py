"""Arrays of routed experts of SGLang and vLLM: zeros never become expert 0."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from sources import (
    FACTS,
    npy_base64,
    routed,
    sglang_response,
    vllm_response,
    write_json,
    write_lines,
)

from oled.trace import NO_EXPERT, Kept, Phase, TraceError, load
from oled.trace.check import check
from oled.trace.importers import import_trace, read_source

SHAPE = {"layers": 4, "top_k": 2}


@pytest.fixture
def ids() -> np.ndarray:
    """Ids of 7 tokens: a prompt of 4, and 3 new ones that were forwarded."""
    return routed(np.random.default_rng(0), 7)


def imported(tmp_path: Path, name: str, source: Path, **options: object):
    folder = tmp_path / "trace"
    trace = load(import_trace(name, source, folder, {**FACTS, **options}))
    report = check(folder)
    assert report.ok, report.lines()
    return trace


@pytest.mark.parametrize("name", ["sglang_routed_experts", "vllm_routed_experts"])
def test_an_array_is_a_request_and_its_dense_layer_is_found(tmp_path, ids, name) -> None:
    np.save(tmp_path / "r.npy", ids)
    trace = imported(tmp_path, name, tmp_path / "r.npy", prompt=4)
    assert trace.geometry.moe_layers == (1, 2, 3)
    assert trace.geometry.num_layers == 4
    assert set(trace.routing.layer) == {1, 2, 3}
    assert trace.forwards.tokens.tolist() == [4, 1, 1, 1]
    assert trace.forwards.phase.tolist() == [Phase.PREFILL, *[Phase.DECODE] * 3]
    assert trace.forwards.context.tolist() == [0, 4, 5, 6]
    assert trace.forwards.produced.tolist() == [0, 1, 1, 1]
    found = trace.routing.expert_ids[:12].reshape(3, 4, 2).swapaxes(0, 1)
    np.testing.assert_array_equal(found, ids[:4, 1:])
    assert "phases" not in trace.manifest.lacks


def test_without_a_prompt_every_token_is_a_forward(tmp_path, ids) -> None:
    np.savez(tmp_path / "r.npz", first=ids, second=ids[:5])
    trace = imported(tmp_path, "sglang_routed_experts", tmp_path / "r.npz")
    assert trace.requests == (0, 1)
    assert trace.forwards.tokens.tolist() == [1] * 12
    assert "phases" in trace.manifest.lacks


def test_unwritten_rows(tmp_path, ids) -> None:
    ids[6] = 0  # a token that was never routed here
    ids[2, 2] = 0  # a row of one layer that was not written
    np.save(tmp_path / "r.npy", ids)
    trace = imported(tmp_path, "vllm_routed_experts", tmp_path / "r.npy", prompt=4)
    assert trace.forwards.tokens.tolist() == [4, 1, 1]
    assert trace.manifest.provenance["unwritten_tokens"] == 1
    (gap,) = trace.manifest.gaps
    assert (gap.layer, gap.phase, gap.kept) == (2, Phase.PREFILL, Kept.SOME)
    assert len(trace.routing.forward) == 6 * 3 - 1


def test_expert_0_alone_is_a_route_and_zeros_are_none(tmp_path, ids) -> None:
    ids[1, 1], ids[2, 1], ids[3, 1] = [0, -1], [-1, -1], [0, 0]
    np.save(tmp_path / "r.npy", ids)
    trace = imported(tmp_path, "vllm_routed_experts", tmp_path / "r.npy", prompt=7)
    assert trace.geometry.moe_layers == (1, 2, 3)
    first = trace.routing.expert_ids[trace.routing.layer == 1]
    assert first[1].tolist() == [0, NO_EXPERT]
    assert len(first) == 5


def test_half_written_rows_are_refused(tmp_path) -> None:
    wide = routed(np.random.default_rng(0), 7, top_k=3)
    wide[5, 3] = [4, 0, 0]
    np.save(tmp_path / "r.npy", wide)
    with pytest.raises(TraceError, match=r"token 5, layer 3: ids .4, 0, 0. name an expert twice"):
        read_source("vllm_routed_experts", tmp_path / "r.npy", FACTS)


def test_unused_slots_go(tmp_path, ids) -> None:
    for fill in (0, -1):
        wide = np.concatenate([ids, np.full_like(ids, fill)], axis=2)
        np.save(tmp_path / "r.npy", wide)
        folder = tmp_path / str(fill)
        folder.mkdir()
        trace = imported(folder, "vllm_routed_experts", tmp_path / "r.npy", top_k=2)
        assert trace.geometry.top_k == 2
    assert imported(tmp_path, "vllm_routed_experts", tmp_path / "r.npy").geometry.top_k == 2
    with pytest.raises(TraceError, match="rows hold 4 experts, top_k=1 does not fit"):
        read_source("vllm_routed_experts", tmp_path / "r.npy", FACTS | {"top_k": 1})


def test_top_1_needs_its_dense_layers_named(tmp_path, ids) -> None:
    one = ids[..., :1].copy()
    one[:, 1, 0] = [0, 1, 0, 2, 0, 0, 3]  # expert 0 is real here
    np.save(tmp_path / "r.npy", one)
    with pytest.raises(TraceError, match="layer 0 is all zeros: dense, or always expert 0"):
        read_source("sglang_routed_experts", tmp_path / "r.npy", FACTS)
    options = {"layers": 4, "moe_layers": "1-3"}
    trace = imported(tmp_path, "sglang_routed_experts", tmp_path / "r.npy", **options)
    assert (trace.routing.expert_ids[trace.routing.layer == 1] == 0).sum() == 4


def test_named_layers_are_held_against_the_array(tmp_path, ids) -> None:
    np.save(tmp_path / "r.npy", ids)
    for options, message in (
        ({"layers": 4, "moe_layers": "2-3"}, "layer 1 was named dense, but has expert ids"),
        ({"layers": 4, "moe_layers": "0-3"}, "layer 0 has no row: it was not captured"),
        ({"layers": 9, "moe_layers": "1-8"}, "has 4 layers; a model of 9 layers"),
    ):
        with pytest.raises(TraceError, match=message):
            read_source("sglang_routed_experts", tmp_path / "r.npy", FACTS | options)


def test_an_axis_of_moe_layers_alone(tmp_path, ids) -> None:
    np.save(tmp_path / "r.npy", ids[:, 1:])
    options = {"layers": 4, "moe_layers": "1-3"}
    trace = imported(tmp_path, "vllm_routed_experts", tmp_path / "r.npy", **options)
    assert trace.geometry.moe_layers == (1, 2, 3)


@pytest.mark.parametrize("experts", [300, 256])
def test_narrow_types_keep_large_ids(tmp_path, experts) -> None:
    rng = np.random.default_rng(0)
    order = np.argsort(rng.random((5, 3, experts)), axis=2)[..., :2]
    order[0, 0] = [experts - 1, 0]
    np.save(tmp_path / "r.npy", order.astype(np.uint8 if experts == 256 else np.int16))
    trace = imported(tmp_path, "vllm_routed_experts", tmp_path / "r.npy", experts=experts)
    assert trace.routing.expert_ids[0].tolist() == [experts - 1, 0]


# --- JSON -----------------------------------------------------------------------------------------


def test_sglang_responses(tmp_path, ids) -> None:
    both = [sglang_response(ids, 4), sglang_response(ids[:5], 3)]
    for file in (write_json(tmp_path / "a.json", both), write_lines(tmp_path / "a.jsonl", both)):
        trace = imported(tmp_path / file.suffix[1:], "sglang_routed_experts", file, **SHAPE)
        assert trace.requests == (0, 1)
        assert trace.forwards.tokens.tolist() == [4, 1, 1, 1, 3, 1, 1]
        assert trace.geometry.moe_layers == (1, 2, 3)


def test_sglang_responses_that_lost_rows(tmp_path, ids) -> None:
    file = tmp_path / "a.json"
    response = sglang_response(ids, 4)
    for change, message in (
        ({"completion_tokens": 5}, "7 rows for 4 prompt and 5 new tokens; expected 8"),
        ({"routed_experts": "AAAA"}, "3 bytes are no whole number of int32 rows"),
        ({"routed_experts": "!"}, "not base64"),
        ({"routed_experts": None}, "'routed_experts' must be str, found None"),
    ):
        write_json(file, {**response, "meta_info": response["meta_info"] | change})
        with pytest.raises(TraceError, match=message):
            read_source("sglang_routed_experts", file, FACTS | SHAPE)
    write_json(file, response)
    with pytest.raises(TraceError, match="the bytes hold no shape: give layers="):
        read_source("sglang_routed_experts", file, FACTS)
    write_json(file, {"text": "no routes"})
    with pytest.raises(TraceError, match="'meta_info' is missing"):
        read_source("sglang_routed_experts", file, FACTS | SHAPE)


@pytest.mark.parametrize("form", ["lists", "npy", "dict"])
def test_vllm_responses(tmp_path, ids, form) -> None:
    def said(part: np.ndarray) -> object:
        if form == "npy":
            return npy_base64(part.astype(np.int16))
        if form == "dict":
            data = base64.b64encode(part.astype(np.int16).tobytes()).decode()
            return {"encoding": "base64", "dtype": "int16", "shape": part.shape, "data": data}
        return part.tolist()

    more = {"prompt_token_ids": [5, 6, 7, 8]}
    response = vllm_response(said(ids[:4]), said(ids[4:]), said(ids[4:6]), **more)
    for choice, tokens in zip(response["choices"], ([1, 2, 3, 4], [1, 2, 3]), strict=True):
        choice["token_ids"] = tokens
    trace = imported(tmp_path, "vllm_routed_experts", write_json(tmp_path / "a.json", response))
    assert trace.forwards.request.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.forwards.tokens.tolist() == [4, 1, 1, 1, 1, 1]
    assert trace.forwards.context.tolist() == [0, 4, 5, 6, 4, 5]
    assert trace.tokens.token_id.tolist() == [5, 6, 7, 8, 1, 2, 3, 1, 2]


def test_vllm_rows_of_prompt_and_answer_in_one(tmp_path, ids) -> None:
    response = vllm_response(None, npy_base64(ids), prompt_token_ids=[5, 6, 7, 8])
    response["choices"][0]["token_ids"] = [1, 2, 3, 4]
    trace = imported(tmp_path, "vllm_routed_experts", write_json(tmp_path / "a.json", response))
    assert trace.forwards.tokens.tolist() == [4, 1, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "generated", "message"),
    [
        (None, None, "neither prompt_routed_experts nor routed_experts: was the option on"),
        ([[[1, 2]], [[1]]], None, "not readable as an array of ids"),
        ([[[1.5, 2.0]]], None, "ids of type float64"),
        ([[1, 2]], None, "must be integers .tokens, layers, k"),
        (7, None, "7 is no array of ids"),
        ([[[1, 2]]], [[[1, 2], [3, 4]]], "do not fit"),
        ({"data": "AAAA", "dtype": "O", "shape": [1]}, None, "not readable as an array of ids"),
        ({"data": "AAAA", "dtype": "int16", "shape": [9, 9]}, None, "not readable as an array"),
        ([[[1, -7]]], None, "expert id -7 is neither -1 nor"),
        ([[[1, 70000]]], None, "expert id 70000 is neither"),
        ([[[0, 0]]], None, "every id is zero: the router was not captured"),
    ],
)
def test_vllm_refusals(tmp_path, prompt, generated, message) -> None:
    file = write_json(tmp_path / "a.json", vllm_response(prompt, generated))
    with pytest.raises(TraceError, match=message):
        read_source("vllm_routed_experts", file, FACTS)
