"""What other tools get: the long view, requests to a cache, hot experts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from small import PAD, PROMPT, diffusion, geometry, manifest, record, routes, write

from oled.trace import NO_EXPERT, Phase, Trace, TraceError, WeightKind, build_steps, load
from oled.trace.exporters import EXPORTERS, export_trace
from oled.trace.exporters.cachesim import RECORD
from oled.trace.options import OptionError
from oled.trace.stream import TraceStream

SHAPE = geometry()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some requests, a padded prefill, unused slots and a zero expert."""
    shape = geometry(zero_experts=1)
    ids, weights = routes(np.random.default_rng(0), shape, 4)
    ids[1, 2, 1], weights[1, 2] = NO_EXPERT, [1, 0]
    ids[2, 3, 0] = 8  # the zero expert
    padded = record(
        ids,
        weights,
        request=9,
        pass_id=10**6,
        phase=Phase.PREFILL,
        state=np.array([PAD, PROMPT, PROMPT, PROMPT]),
        positions=np.array([0, 0, 1, 2]),
        confidence=np.full(4, np.nan),
    )
    records = [*diffusion(shape, requests=3), padded]
    return write(tmp_path / "t", manifest(shape), records, rows_per_part=100)


def long_rows(trace: Trace) -> list[tuple[int, ...]]:
    """(forward, layer, token, slot, expert), the plain way."""
    r = trace.routing
    return [
        (int(r.forward[i]), int(r.layer[i]), int(r.token[i]), slot, int(expert))
        for i in range(len(r.forward))
        for slot, expert in enumerate(r.expert_ids[i])
        if expert != NO_EXPERT
    ]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_the_long_view(tmp_path: Path, folder: Path, kind: str) -> None:
    file = export_trace(kind, folder, tmp_path / f"long.{kind}")
    frame = pd.read_csv(file) if kind == "csv" else pd.read_parquet(file)
    trace = load(folder)
    keys = ["forward", "layer", "token", "slot", "expert"]
    assert list(frame[keys].itertuples(index=False, name=None)) == long_rows(trace)
    row = trace.forwards.token_offsets[frame.forward] + frame.token.to_numpy()
    np.testing.assert_array_equal(frame.request, trace.forwards.request[frame.forward])
    np.testing.assert_array_equal(frame.position, trace.tokens.position[row])
    np.testing.assert_allclose(
        frame.confidence.to_numpy(dtype=float), trace.tokens.confidence[row], rtol=1e-6
    )
    names = [phase.name.lower() for phase in Phase]
    assert frame.phase.tolist() == [names[p] for p in trace.forwards.phase[frame.forward]]
    assert set(frame.state) == {"masked", "decoded", "prompt", "pad"}
    assert frame.block.isna().sum() == (trace.forwards.block[frame.forward] < 0).sum()
    weights = trace.routing.weights[trace.routing.expert_ids != NO_EXPERT]
    np.testing.assert_allclose(frame.weight.to_numpy(dtype=float), weights, rtol=1e-6)


def test_weights_that_are_none_are_null(tmp_path: Path) -> None:
    ids, weights = routes(np.random.default_rng(0), SHAPE, 2)
    source = write(
        tmp_path / "t", manifest(SHAPE, weight_kind=WeightKind.NONE), [record(ids, weights * 0)]
    )
    file = export_trace("parquet", source, tmp_path / "long.parquet")
    assert pq.read_table(file).column("weight").null_count == 12


def accesses(trace: Trace) -> list[tuple[int, int, int]]:
    """(forward, layer, expert) of each layer-step's active experts, in recorded order."""
    steps = build_steps(trace)
    found = []
    for step in range(steps.num_steps):
        layer = trace.geometry.moe_layers[steps.layer[step]]
        forward = int(steps.source[steps.forward[step]])
        for expert in steps.expert[steps.offsets[step] : steps.offsets[step + 1]]:
            found.append((forward, layer, int(expert)))
    return sorted(found)


def test_oracle_general(tmp_path: Path, folder: Path) -> None:
    file = export_trace("oracle_general", folder, tmp_path / "t.oracleGeneral")
    assert RECORD.itemsize == 24
    found = np.fromfile(file, RECORD)
    assert file.stat().st_size == 24 * len(found)
    trace = load(folder)
    expected = accesses(trace)
    keys = [(int(r["time"]), int(r["object"]) >> 16, int(r["object"]) & 0xFFFF) for r in found]
    assert keys == expected
    bytes_of = dict(zip(trace.geometry.moe_layers, trace.geometry.expert_bytes, strict=True))
    assert found["size"].tolist() == [bytes_of[layer] for _, layer, _ in expected]
    following, upcoming = [], {}
    for place in reversed(range(len(expected))):
        following.append(upcoming.get(expected[place][1:], -1))
        upcoming[expected[place][1:]] = place
    assert found["next"].tolist() == following[::-1]


def test_next_accesses_across_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE, requests=6))
    whole = export_trace("oracle_general", source, tmp_path / "whole").read_bytes()
    csv = export_trace("csv", source, tmp_path / "whole.csv").read_bytes()
    monkeypatch.setattr(TraceStream.windows, "__defaults__", (7,))
    assert export_trace("oracle_general", source, tmp_path / "small").read_bytes() == whole
    assert export_trace("csv", source, tmp_path / "small.csv").read_bytes() == csv


def test_accesses_by_token(tmp_path: Path, folder: Path) -> None:
    file = export_trace("oracle_general", folder, tmp_path / "t.bin", {"access": "token"})
    found = np.fromfile(file, RECORD)
    trace = load(folder)
    pad = trace.num_forwards - 1
    rows = [row for row in long_rows(trace) if row[:1] + row[2:3] != (pad, 0) and row[4] != 8]
    keys = [(int(r["time"]), int(r["object"]) >> 16, int(r["object"]) & 0xFFFF) for r in found]
    assert keys == [(row[0], row[1], row[4]) for row in rows]


def test_libcachesim_csv(tmp_path: Path, folder: Path) -> None:
    file = export_trace("libcachesim_csv", folder, tmp_path / "t.csv")
    frame = pd.read_csv(file)
    assert file.read_text().partition("\n")[0] == "time,obj_id,obj_size"
    binary = np.fromfile(export_trace("oracle_general", folder, tmp_path / "t.bin"), RECORD)
    for column, name in (("time", "time"), ("obj_id", "object"), ("obj_size", "size")):
        np.testing.assert_array_equal(frame[column], binary[name])


def test_libcachesim_reads_it(tmp_path: Path) -> None:
    """The same misses of an LRU as a plain one has; Belady, which uses `next`, has fewer."""
    lcs = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    source = write(tmp_path / "t", manifest(geometry(32)), diffusion(geometry(32), requests=20))
    file = export_trace("oracle_general", source, tmp_path / "t.oracleGeneral")
    found = np.fromfile(file, RECORD)
    slots, recent, misses = 30, {}, 0
    for item in found["object"].tolist():
        misses += item not in recent
        recent.pop(item, None)
        recent[item] = True
        if len(recent) > slots:
            recent.pop(next(iter(recent)))
    ratios = []
    for policy in (lcs.LRU, lcs.Belady):
        reader = lcs.TraceReader(
            str(file),
            lcs.TraceType.ORACLE_GENERAL_TRACE,
            lcs.ReaderInitParam(ignore_obj_size=True),
        )
        ratios.append(policy(slots).process_trace(reader)[0])
    assert ratios[0] == pytest.approx(misses / len(found))
    assert ratios[1] < ratios[0]


def test_hot_experts(tmp_path: Path, folder: Path) -> None:
    file = export_trace("hot_experts", folder, tmp_path / "hot.json")
    data = json.loads(file.read_text())
    trace = load(folder)
    steps = build_steps(trace)
    assert list(data["layers"]) == ["1", "2", "3"]
    for place, layer in enumerate(data["layers"].values()):
        entries = np.repeat(steps.layer, np.diff(steps.offsets)) == place
        tokens, forwards = Counter(), Counter()
        for expert, count in zip(steps.expert[entries], steps.count[entries], strict=True):
            tokens[int(expert)] += int(count)
            forwards[int(expert)] += 1
        order = sorted(range(8), key=lambda expert: (-tokens[expert], expert))
        assert [one["expert"] for one in layer] == order
        assert [one["tokens"] for one in layer] == [tokens[expert] for expert in order]
        assert [one["forwards"] for one in layer] == [forwards[expert] for expert in order]
    top = json.loads(
        export_trace("hot_experts", folder, tmp_path / "top.json", {"top": 2}).read_text()
    )
    assert top["layers"]["1"] == data["layers"]["1"][:2]


def test_refusals(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(OptionError, match="no format 'parket' to export; did you mean 'parquet'"):
        export_trace("parket", folder, tmp_path / "x")
    with pytest.raises(OptionError, match="export csv has no option 'top'; it takes none"):
        export_trace("csv", folder, tmp_path / "x", {"top": 1})
    with pytest.raises(OptionError, match="access='slot'"):
        export_trace("oracle_general", folder, tmp_path / "x", {"access": "slot"})
    export_trace("csv", folder, tmp_path / "x")
    for name in EXPORTERS:
        with pytest.raises(TraceError, match="x: exists already"):
            export_trace(name, folder, tmp_path / "x")
    assert not [file for file in tmp_path.iterdir() if "unclosed" in file.name]


def test_a_failing_export_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    last = sorted(folder.glob("routing-*"))[-1]
    last.write_bytes(last.read_bytes()[:-200])
    for name in EXPORTERS:
        with pytest.raises(TraceError, match=f"{last.name}: not readable"):
            export_trace(name, folder, tmp_path / "out")
        assert [file.name for file in tmp_path.iterdir()] == ["t"]


def test_experts_beyond_32_bits(tmp_path: Path) -> None:
    shape = replace(SHAPE, expert_bytes=(2**32,) * 3)
    source = write(tmp_path / "t", manifest(shape), diffusion(shape))
    with pytest.raises(TraceError, match="counts bytes of an object in 32 bits"):
        export_trace("oracle_general", source, tmp_path / "x")
