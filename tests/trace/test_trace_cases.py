"""The named cases that a trace must get right: layers, ids, pads, prefills, numbers, crashes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small import PAD, PROMPT, assert_holds, diffusion, geometry, manifest, record, routes, write

from oled.bundled.plots.locality import draw
from oled.sim.api import simulate
from oled.trace import NO_EXPERT, Phase, RouterScores, TraceError, TraceWriter, build_steps, load
from oled.trace.check import check
from oled.trace.exporters import export_trace
from oled.trace.stats import locality
from oled.trace.view import view

SHAPE = geometry()


def test_g05_a_dense_layer_has_no_rows(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE)))
    assert set(trace.routing.layer) == {1, 2, 3}
    assert trace.geometry.dense_layers == 1
    assert locality(trace).layers == (1, 2, 3)
    export_trace("hot_experts", tmp_path / "t", tmp_path / "hot.json")
    assert list(json.loads((tmp_path / "hot.json").read_text())["layers"]) == ["1", "2", "3"]


def test_g06_many_experts_and_the_sentinel(tmp_path: Path) -> None:
    shape = geometry(512, layers=1, top_k=10)
    ids = np.array([[[0, 127, 128, 255, 256, 511, -1, -1, -1, -1]]], dtype=np.int16)
    weights = np.where(ids >= 0, 1 / 6, 0.0)
    trace = load(write(tmp_path / "t", manifest(shape), [record(ids, weights)]))
    expected = [0, 127, 128, 255, 256, 511] + [NO_EXPERT] * 4
    np.testing.assert_array_equal(trace.routing.expert_ids, [expected])
    assert check(tmp_path / "t").ok
    assert view(tmp_path / "t").groupby("expert").size().index.tolist() == expected[:6]
    assert build_steps(trace).expert.tolist() == expected[:6]
    result = simulate(tmp_path / "t", "lru", slots=16, references=False)
    assert (result.metrics["accesses_all"], result.metrics["transfers_all"]) == (6, 6)


def test_g08_a_prefill_keeps_its_last_token(tmp_path: Path) -> None:
    ids, weights = routes(np.random.default_rng(0), SHAPE, 5)
    one = record(
        ids, weights, phase=Phase.PREFILL, state=np.full(5, PROMPT), confidence=np.full(5, np.nan)
    )
    trace = load(write(tmp_path / "t", manifest(SHAPE), [one]))
    for layer in (1, 2, 3):
        np.testing.assert_array_equal(trace.routing.token[trace.routing.layer == layer], range(5))
    assert check(tmp_path / "t").ok


def test_g11_float16_scores_are_stored_as_float32(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids, weights = routes(rng, SHAPE, 2)
    values = np.zeros((3, 2, 2), dtype=np.float16)
    values[0, 0] = 65504, 0
    values[1, 1] = np.inf, np.nan
    one = record(ids, weights, scores=RouterScores(ids, values))
    trace = load(write(tmp_path / "t", manifest(SHAPE), [one]))
    assert trace.scores is not None
    assert trace.scores.values.dtype == np.float32
    np.testing.assert_array_equal(trace.scores.values, values.reshape(-1, 2).astype(np.float32))
    (finding,) = check(tmp_path / "t").findings
    assert (finding.rule, finding.row, finding.layer) == ("side_tables", 3, 2)


def test_g15_layers_of_different_sizes(tmp_path: Path) -> None:
    shape = geometry([8, 6, 4])
    trace = load(write(tmp_path / "t", manifest(shape), diffusion(shape)))
    assert trace.geometry.experts_per_layer == (8, 6, 4)
    found = locality(trace).to_json()
    assert [len(layer) for layer in found["popularity"]["sorted_shares"]] == [8, 6, 4]
    *curves, _ = draw(found).axes[3].lines  # the last is what an even spread would be
    assert [len(curve.get_xdata()) for curve in curves] == [9, 7, 5]
    assert {curve.get_xdata()[-1] for curve in curves} == {1.0}
    export_trace("hot_experts", tmp_path / "t", tmp_path / "hot.json")
    hot = json.loads((tmp_path / "hot.json").read_text())["layers"]
    assert {layer: max(e["expert"] for e in found) for layer, found in hot.items()} == {
        "1": 7,
        "2": 5,
        "3": 3,
    }
    ids, weights = routes(np.random.default_rng(0), shape, 1)
    ids[2, 0, 1] = 7
    writer = TraceWriter(tmp_path / "u", manifest(shape))
    with pytest.raises(TraceError, match="layer 3, token 0: expert id 7 where the layer has 4"):
        writer.append(record(ids, weights))


def test_g03_pads_are_flagged(tmp_path: Path) -> None:
    """Left-padded batch of lengths 3 and 8, k 2, 3 MoE layers: 11 x 3 x 2 real routes."""
    rng = np.random.default_rng(0)
    records = []
    for request, length in enumerate((3, 8)):
        ids, weights = routes(rng, SHAPE, 8)
        state = np.where(np.arange(8) < 8 - length, PAD, PROMPT)
        records.append(
            record(
                ids,
                weights,
                request=request,
                phase=Phase.PREFILL,
                state=state,
                positions=np.maximum(np.arange(8) - (8 - length), 0),
                confidence=np.full(8, np.nan),
            )
        )
    trace = load(write(tmp_path / "t", manifest(SHAPE), records))
    report = check(tmp_path / "t")
    assert report.ok
    assert report.pad_tokens == 5
    token = trace.forwards.token_offsets[trace.routing.forward] + trace.routing.token
    assert (trace.tokens.state[token] != PAD).sum() * 2 == 66


CRASHING = """
import sys
sys.path.insert(0, {tests!r})
from small import diffusion, geometry, manifest
from oled.trace import TraceWriter
shape = geometry()
records = diffusion(shape, requests=40)
with TraceWriter({folder!r}, manifest(shape), rows_per_part=120, rows_per_group=12) as writer:
    for number, one in enumerate(records):
        writer.append(one)
        # 3 parts of 3 tables, the 4th open
        if len(writer.manifest.parts) == 9 and writer._folder._files:
            print(number, flush=True)
            sys.stdin.read()
"""


def test_g10_a_killed_recorder_leaves_its_closed_parts(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    code = CRASHING.format(tests=str(Path(__file__).parent), folder=str(folder))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as recorder:
        assert recorder.stdout is not None
        appended = int(recorder.stdout.readline()) + 1
        os.kill(recorder.pid, signal.SIGKILL)
        recorder.wait()
    with pytest.raises(TraceError) as refusal:
        load(folder)
    trace = load(folder, allow_partial=True, verify=True)
    kept = trace.num_forwards
    assert 0 < kept < appended
    message = str(refusal.value)
    assert "routing-00003.parquet.unclosed" in message
    assert f"3 closed parts hold forwards 0 to {kept - 1}" in message
    assert f"from forward {kept} on is lost" in message
    assert "allow_partial" in message
    assert_holds(trace, diffusion(SHAPE, requests=40)[:kept])
    report = check(folder)
    assert set(report.breaches) == {"complete"}
