"""Arrays ids, w, start, phase, layers: made-up ones, and the public ones where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sources import FACTS, token_arrays
from test_importers import public

from oled.trace import Kept, Phase, Trace, TraceError, WeightKind, load
from oled.trace.check import check
from oled.trace.importers import import_trace, read_source

BYTES = {"expert_bytes": 1000}


def save(folder: Path, **changes: Any) -> Path:
    np.savez(folder / "a.npz", **token_arrays(**changes))
    return folder / "a.npz"


def imported(folder: Path, options: dict[str, Any] | None = None, **changes: Any) -> Trace:
    source = save(folder, **changes)
    trace = load(import_trace("token_arrays", source, folder / "t", {**BYTES, **(options or {})}))
    report = check(folder / "t")
    assert report.ok, report.lines()
    return trace


def test_a_prompt_is_one_forward_and_each_later_token_is_one(tmp_path: Path) -> None:
    trace = imported(tmp_path)
    decode, prefill = Phase.DECODE, Phase.PREFILL
    assert trace.forwards.request.tolist() == [0, 0, 0, 1, 1, 1]
    assert trace.forwards.phase.tolist() == [prefill, decode, decode] * 2
    assert trace.forwards.tokens.tolist() == [3, 1, 1, 1, 1, 1]
    assert trace.forwards.context.tolist() == [0, 3, 4, 0, 1, 2]
    assert trace.forwards.produced.tolist() == [0, 1, 1, 0, 1, 1]
    assert trace.tokens.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    made = token_arrays()
    rows = [(token, place) for place in (0, 1) for token in (0, 1, 2)]  # the first forward's
    assert trace.routing.expert_ids[:6].tolist() == [made["ids"][at].tolist() for at in rows]
    assert trace.routing.weights[:6].tolist() == [made["w"][at].tolist() for at in rows]
    assert trace.geometry.moe_layers == (1, 3)
    assert set(trace.geometry.experts_per_layer) == {8}
    assert trace.manifest.model["id"] == "toy"
    assert trace.manifest.weight_kind is WeightKind.SUM_ONE
    assert set(trace.manifest.lacks) == {"confidence", "passes", "token_ids"}


def test_it_says_what_is_lacking(tmp_path: Path) -> None:
    for number, (changes, more) in enumerate(
        (
            ({"w": None}, {"weights"}),
            ({"phase": None}, {"phases"}),
            ({"phase": np.ones(8, dtype=np.uint8)}, {"prefill", "positions"}),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        trace = imported(folder, **changes)
        assert set(trace.manifest.lacks) == {"confidence", "passes", "token_ids"} | more


def test_meta_says_where_a_request_begins(tmp_path: Path) -> None:
    meta = np.array(json.dumps({"prompts": [{"first_pos": 10}, {"first_pos": 20}]}))
    trace = imported(tmp_path, phase=np.ones(8, dtype=np.uint8), meta=meta)
    assert trace.tokens.position.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert trace.forwards.context.tolist() == trace.tokens.position.tolist()
    assert "positions" not in trace.manifest.lacks
    assert "prefill" in trace.manifest.lacks


def test_missing_rows_are_gaps_and_tokens_without_any_are_left_out(tmp_path: Path) -> None:
    ids = token_arrays()["ids"]
    ids[1, 0] = ids[7] = -1
    weights = token_arrays()["w"]
    weights[7] = np.nan  # of no row, so of no account
    trace = imported(tmp_path, ids=ids, w=weights)
    (gap,) = trace.manifest.gaps
    assert (gap.layer, gap.phase, gap.kept) == (1, Phase.PREFILL, Kept.SOME)
    assert trace.forwards.tokens.tolist() == [3, 1, 1, 1, 1]
    assert len(trace.routing.forward) == 8 * 2 - 3
    assert trace.manifest.provenance["missing_tokens"] == 1


@pytest.mark.parametrize(
    ("asked", "kind", "total"),
    [
        ("none", WeightKind.NONE, None),
        ("softmax_selected", WeightKind.SOFTMAX_SELECTED, None),
        ("2.5", WeightKind.SCALED_SUM, 2.5),
    ],
)
def test_kinds_of_weight(tmp_path: Path, asked: str, kind: WeightKind, total: float | None) -> None:
    weights = token_arrays()["w"] * np.float32(total or 1)
    trace = imported(tmp_path, {"weights": asked}, w=weights)
    assert (trace.manifest.weight_kind, trace.manifest.weight_sum) == (kind, total)
    assert ("weights" in trace.manifest.lacks) == (kind is WeightKind.NONE)
    assert bool(trace.routing.weights.any()) == (kind is not WeightKind.NONE)


def put(name: str, at: Any, value: float) -> dict[str, Any]:
    array = token_arrays()[name]
    array[at] = value
    return {name: array}


def meta(value: Any) -> dict[str, Any]:
    return {"meta": np.array(json.dumps(value))}


IDS = token_arrays()["ids"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": None}, "'ids' is missing; expected ids, start, layers, n_experts, phase, w, meta"),
        ({"start": None}, "'start' is missing"),
        ({"ids": IDS.astype(float)}, "ids are float64, not integers"),
        ({"phase": np.ones(8)}, "phase are float64, not integers"),
        ({"n_experts": np.int64(0)}, "n_experts 0 must be one number from 1 to 65534"),
        ({"n_experts": np.arange(2)}, r"n_experts \[0, 1\] must be one number"),
        ({"layers": np.array([[1, 3]])}, r"layers \[1, 2\] must be a list"),
        ({"layers": np.array([3, 1])}, r"layers\[1\] is 1: ids must ascend"),
        (
            {"layers": np.array([1, 70000])},
            r"layers\[1\] is 70000: ids must ascend, from 0 to 65535",
        ),
        ({"layers": np.array([0, 1, 3])}, r"ids \[8, 2, 2\] must be \[tokens, 3 layers, k\]"),
        ({"ids": IDS[0]}, r"ids \[2, 2\] must be \[tokens, 2 layers, k\]"),
        (put("ids", (4, 1, 0), 8), r"token 4, layer 3: expert 8 is neither -1 nor in 0..7"),
        (put("ids", (4, 1, 0), -2), "token 4, layer 3: expert -2 is neither"),
        (put("ids", (4, 1, 1), -1), r"token 4, layer 3: the row \[\d, -1\] has -1 beside experts"),
        (put("ids", (2, 0), 5), r"token 2, layer 1: the row \[5, 5\] names one twice"),
        (put("ids", slice(5, 8), -1), "request 1 has no row of any token"),
        ({"start": np.array([0, 5, 9])}, r"start must be a list from 0 to the 8 tokens of ids"),
        ({"start": np.array([0])}, r"start must be a list .* found \[0\]"),
        ({"start": np.array([0, 5, 5, 8])}, "start: request 1 goes from token 5 to 5"),
        ({"start": np.array([0, 9, 8])}, "start: request 1 goes from token 9 to 8"),
        ({"phase": np.zeros(7, int)}, r"phase \[7\] must have the 8 tokens of ids"),
        (put("phase", 2, 3), r"phase: token 2 is 3, neither 0 \(prompt\) nor 1"),
        (put("phase", 4, 0), "phase: token 4 is of a prompt, the one before it is generated"),
        ({"w": np.ones((8, 2, 3))}, r"w float64\[8, 2, 3\] must be floats \[8, 2, 2\], as ids"),
        ({"w": np.ones((8, 2, 2), int)}, r"w int64\[8, 2, 2\] must be floats"),
        (put("w", (6, 1, 0), np.nan), r"w: token 6, layer 3: the weights \[nan, "),
        (put("w", (6, 1, 0), -1), r"w: token 6, layer 3: the weights \[-1.0, "),
        ({"w": np.full((8, 2, 2), 1e300)}, r"w: token 0, layer 1: the weights \[1e\+300"),
        ({"meta": np.array("{")}, "meta: not readable as JSON"),
        ({"meta": np.arange(2)}, "meta must be the text of a JSON object"),
        (meta([1]), "meta must be the text of a JSON object"),
        (meta({"model": 7}), "meta must be the text of a JSON object whose model is a name"),
        (meta({"prompts": [{"first_pos": 3}]}), "prompts must have a first_pos, .* of the 2 req"),
        (meta({"prompts": [{"first_pos": -3}, {"first_pos": 1}]}), "must have a first_pos"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as error:
        read_source("token_arrays", save(tmp_path, **changes), BYTES)
    assert "\n" not in str(error.value)
    assert "a.npz" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"does not say the bytes of an expert: give expert_bytes="),
        ({**FACTS, "experts": 9}, "9 experts of a layer were named, the recording has 8"),
        ({**FACTS, "top_k": 3}, "3 experts a token were named, the recording has 2"),
        ({**FACTS, "moe_layers": "1-2"}, "the recording has experts in 1..3"),
        ({**FACTS, "weights": "heavy"}, "weights='heavy': must be a positive number"),
    ],
)
def test_options_that_contradict(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_source("token_arrays", save(tmp_path), options)


def test_weights_are_asked_for_and_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="weights=sum_one, but there is no array 'w'"):
        read_source("token_arrays", save(tmp_path, w=None), {**BYTES, "weights": "sum_one"})


def test_public_file(tmp_path: Path) -> None:
    source = public("gptoss20b/gptoss20b_decode.npz")
    options = {"model": "gpt_oss_20b", "weights": "softmax_selected"}
    trace = load(import_trace("token_arrays", source, tmp_path / "t", options))
    with np.load(source, allow_pickle=False) as data:
        np.testing.assert_array_equal(trace.routing.expert_ids, data["ids"].reshape(-1, 4))
        np.testing.assert_array_equal(trace.routing.weights, data["w"].reshape(-1, 4))
        assert np.bincount(trace.forwards.request).tolist() == np.diff(data["start"]).tolist()
    assert trace.forwards.context[:2].tolist() == [103, 104]
