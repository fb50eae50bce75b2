"""SGLang's expert distribution dumps in all modes (G09)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sources import (
    EXPERTS,
    FACTS,
    LAYERS,
    count_record,
    logical,
    physical_ids,
    save_dump,
    save_stat,
    token_record,
)

from oled.sim.prepared import PreparedTrace
from oled.trace import NO_EXPERT, Phase, TokenState, TraceError, build_steps, load
from oled.trace.check import check
from oled.trace.importers import import_trace, read_source

EXTEND, DECODE = 1, 2
K = 6


@pytest.fixture
def two_passes() -> tuple[np.ndarray, np.ndarray]:
    """Ids of a prefill of 3 + 2 tokens of two requests, and of a decoding pass of both."""
    rng = np.random.default_rng(0)
    return physical_ids(rng, 5, K), physical_ids(rng, 2, K)


def records(rank: int, two_passes: tuple[np.ndarray, np.ndarray]) -> list[dict]:
    prefill, decode = two_passes
    return [
        token_record(7, rank, prefill, [0, 1, 2, 0, 1], EXTEND),
        token_record(8, rank, decode, [3, 2], DECODE),
    ]


def test_g09_tensor_parallel_copies_count_once(tmp_path: Path, two_passes) -> None:
    """k = 6 in a width-8 array, two ranks, replicated experts in the map."""
    for rank in range(2):
        save_dump(tmp_path / "dump", rank, records(rank, two_passes))
    trace = load(import_trace("sglang_dump", tmp_path / "dump", tmp_path / "t", FACTS))
    assert check(tmp_path / "t").ok, check(tmp_path / "t").lines()
    assert trace.geometry.top_k == K
    assert trace.geometry.moe_layers == (1, 2, 3)
    assert trace.geometry.num_layers == LAYERS
    assert trace.forwards.tokens.tolist() == [5, 2]
    assert trace.forwards.phase.tolist() == [Phase.PREFILL, Phase.DECODE]
    assert trace.forwards.context.tolist() == [0, 5]
    assert trace.forwards.produced.tolist() == [0, 2]
    assert trace.tokens.position.tolist() == [0, 1, 2, 0, 1, 3, 2]
    assert trace.tokens.token_id.tolist() == [100, 101, 102, 103, 104, 100, 101]
    expected = [logical(ids)[1:, :, :K].reshape(-1, K) for ids in two_passes]
    np.testing.assert_array_equal(trace.routing.expert_ids, np.concatenate(expected))
    assert not trace.manifest.has_weights
    assert set(trace.manifest.lacks) == {"weights", "confidence", "requests"}


def test_g09_data_parallel_ranks_are_added(tmp_path: Path, two_passes) -> None:
    rng = np.random.default_rng(1)
    for rank in (0, 1):
        save_dump(tmp_path / "dump", rank, records(rank, two_passes))
    others = (physical_ids(rng, 5, K), physical_ids(rng, 2, K))
    for rank in (2, 3):
        save_dump(tmp_path / "dump", rank, records(rank, others))
    for options in ({}, {"dp_size": 2}):
        folder = tmp_path / f"t{len(options)}"
        trace = load(import_trace("sglang_dump", tmp_path / "dump", folder, FACTS | options))
        assert check(folder).ok
        assert trace.forwards.tokens.tolist() == [10, 4]
        assert trace.forwards.produced.tolist() == [0, 4]
    with pytest.raises(TraceError, match=r"should be a copy: is dp_size=1 right"):
        read_source("sglang_dump", tmp_path / "dump", FACTS | {"dp_size": 1})
    with pytest.raises(TraceError, match="4 ranks are no 3 groups"):
        read_source("sglang_dump", tmp_path / "dump", FACTS | {"dp_size": 3})


def test_g09_request_ids_are_refused(tmp_path: Path, two_passes) -> None:
    save_dump(tmp_path / "dump", 0, records(0, two_passes))
    with pytest.raises(TraceError, match="can not be tied to requests: the recorder leaves"):
        read_source("sglang_dump", tmp_path / "dump", FACTS | {"requests": "true"})


def test_one_file_without_a_map_holds_logical_ids(tmp_path: Path, two_passes) -> None:
    file = save_dump(tmp_path / "dump", 0, records(0, two_passes))
    data = torch.load(file, weights_only=True)
    data["last_physical_to_logical_map"] = None
    torch.save(data, file)
    with pytest.raises(TraceError, match="does not say the experts of a layer"):
        read_source("sglang_dump", file, {"expert_bytes": 1})
    trace = load(import_trace("sglang_dump", file, tmp_path / "t", FACTS | {"experts": 10}))
    assert int(trace.routing.expert_ids.max()) == 9


def test_padded_tokens_are_pads_and_lost_rows_a_gap(tmp_path: Path, two_passes) -> None:
    prefill, decode = two_passes
    prefill[:, 4] = -1  # a token of no request
    prefill[2, 3] = -1  # a row of one layer
    save_dump(tmp_path / "dump", 0, records(0, (prefill, decode)))
    trace = load(import_trace("sglang_dump", tmp_path / "dump", tmp_path / "t", FACTS))
    assert check(tmp_path / "t").ok
    assert trace.tokens.state[4] == TokenState.PAD
    (gap,) = trace.manifest.gaps
    assert (gap.layer, gap.phase) == (2, Phase.PREFILL)
    assert len(trace.routing.forward) == 3 * 4 - 1 + 3 * 2


def test_per_pass_counts_are_kept(tmp_path: Path, two_passes) -> None:
    for rank in range(2):  # copies
        ranks = [count_record(n, rank, ids) for n, ids in zip((7, 8), two_passes, strict=True)]
        save_dump(tmp_path / "dump", rank, ranks)
    with pytest.raises(TraceError, match="experts a token: give top_k="):
        read_source("sglang_dump", tmp_path / "dump", FACTS)
    options = FACTS | {"top_k": K}
    trace = load(import_trace("sglang_dump", tmp_path / "dump", tmp_path / "t", options))
    assert check(tmp_path / "t").ok
    assert {"tokens", "phases"} <= set(trace.manifest.lacks)
    assert trace.manifest.ordered
    assert trace.forwards.tokens.tolist() == [5, 2]
    steps = build_steps(trace)
    for step in range(steps.num_steps):
        ids = logical(two_passes[steps.forward[step]])[steps.layer[step] + 1]
        here = slice(steps.offsets[step], steps.offsets[step + 1])
        found = np.zeros(EXPERTS, dtype=int)
        found[steps.expert[here]] = steps.count[here]
        np.testing.assert_array_equal(found, np.bincount(ids[ids >= 0], minlength=EXPERTS))


def test_stat_dumps_lose_the_order(tmp_path: Path, two_passes) -> None:
    counts = np.zeros((4, LAYERS, EXPERTS), dtype=int)  # a ring buffer with two unused slots
    for place, ids in zip((3, 0), two_passes, strict=True):
        for layer in range(1, LAYERS):
            found = logical(ids)[layer]
            counts[place, layer] = np.bincount(found[found >= 0], minlength=EXPERTS)
    options = FACTS | {"top_k": K}
    file = save_stat(tmp_path / "expert_distribution_recorder_1.5.pt", counts)
    trace = load(import_trace("sglang_dump", file, tmp_path / "t", options))
    assert check(tmp_path / "t").ok
    assert not trace.manifest.ordered
    assert trace.forwards.tokens.tolist() == [2, 5]
    assert "order" in PreparedTrace.of(trace).lacks
    vouched = load(import_trace("sglang_dump", file, tmp_path / "u", options | {"ordered": "yes"}))
    assert vouched.manifest.ordered
    # four ranks of one tensor-parallel group, added up by the recorder
    save_stat(file, counts * 4)
    with pytest.raises(TraceError, match="all counts are multiples of 4: were 4 copies added up"):
        read_source("sglang_dump", file, options)
    again = load(import_trace("sglang_dump", file, tmp_path / "v", options | {"tp_size": 4}))
    np.testing.assert_array_equal(again.routing.expert_ids, trace.routing.expert_ids)


def test_counts_that_do_not_agree_between_layers(tmp_path: Path) -> None:
    counts = np.zeros((1, LAYERS, EXPERTS), dtype=int)
    counts[0, 1] = [3, 2, 1, 0, 0, 0, 0, 0]  # 3 tokens, of which one expert has all
    counts[0, 2] = [1, 1, 1, 1, 1, 0, 0, 0]  # 2.5 tokens
    counts[0, 3] = [1, 1, 0, 0, 0, 0, 0, 0]  # 1 token
    file = save_stat(tmp_path / "stat.pt", counts)
    trace = load(import_trace("sglang_dump", file, tmp_path / "t", FACTS | {"top_k": 2}))
    assert check(tmp_path / "t").ok
    assert [gap.layer for gap in trace.manifest.gaps] == [3]
    found = trace.routing.expert_ids
    for layer in (1, 2, 3):
        used = found[trace.routing.layer == layer]
        used = used[used != NO_EXPERT]
        np.testing.assert_array_equal(np.bincount(used, minlength=EXPERTS), counts[0, layer])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[0].update(topk_ids_of_layer=torch.zeros(4, 5)), "must be a tensor of int"),
        (lambda r: r[0]["positions"].pop(), "ids of 5 tokens, but 4 positions and 5 input ids"),
        (lambda r: r[0].update(positions=["x"] * 5), "'positions' must hold int, found 'x'"),
        (lambda r: r[0].update(positions=[10**30] * 5), "holds a number beyond 64 bits"),
        (lambda r: r[0].pop("forward_mode"), "'forward_mode' is missing"),
        (lambda r: r[1].update(forward_pass_id=7), "pass 7 of rank 0 is there twice"),
        (lambda r: r[1].clear(), "'forward_pass_id' is missing"),
        (lambda r: [one["topk_ids_of_layer"].fill_(-1) for one in r], "router was not captured"),
        (lambda r: r[0]["topk_ids_of_layer"][1, 2].fill_(10), "layer 1, token 2: expert id 10"),
        (lambda r: r[0].pop("topk_ids_of_layer"), "'topk_ids_of_layer' must be a tensor"),
        (lambda r: r.clear(), "holds no records"),
    ],
)
def test_damaged_dumps_are_named(tmp_path: Path, two_passes, change, message) -> None:
    both = records(0, two_passes)
    change(both)
    save_dump(tmp_path / "dump", 0, both)
    with pytest.raises(TraceError, match=message):
        read_source("sglang_dump", tmp_path / "dump", FACTS)


def test_facts_that_contradict_the_dump(tmp_path: Path, two_passes) -> None:
    save_dump(tmp_path / "dump", 0, records(0, two_passes))
    for options, message in (
        ({"experts": 9}, "experts: 9 experts of a layer were named, the recording has 8"),
        ({"top_k": 5}, "6 columns of ids are used, top_k=5 was named"),
        ({"layers": 5}, "has 4 layers; a model of 5 layers"),
        ({"moe_layers": "2-3"}, "layers 2..3 .2. were named, the recording has experts in 1..3"),
        ({"model": "qwen3"}, "model=qwen3: no model geometry 'qwen3'"),
        ({"topk": 5}, "has no option 'topk'; did you mean 'top_k'"),
        ({"top_k": 0}, "top_k=0: a token has one expert at least"),
    ):
        with pytest.raises(TraceError, match=message):
            read_source("sglang_dump", tmp_path / "dump", FACTS | options)
