"""Other tools' recordings: the public files where they are at hand, and small ones always."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import diffusion, geometry, manifest, write

from oled.errors import UserError
from oled.policies.composition import load_composition
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
from oled.trace import (
    ConfidenceKind,
    Kept,
    Phase,
    Trace,
    TraceError,
    WeightKind,
    build_steps,
    load,
)
from oled.trace.check import check
from oled.trace.importers import IMPORTERS, import_trace, read_source

ROUTING = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "routing"


def public(name: str) -> Path:
    if not ROUTING.is_dir():
        pytest.skip("the folder ../shared/data/routing is not there: public data, not bundled")
    return ROUTING / name


HEADER = """# route_trace v1
# model=/phone/toy.gguf arch=toy n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
# layer=1 expert_bytes=90 dense_bytes=6
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""
# three prompt tokens (layer 1 for the last only), two decoded ones
ROWS = """0,0,0,0,0,3,0.75,0,100
0,0,0,0,1,1,0.25,0,100
0,0,1,0,0,2,0.5,0,100
0,0,1,0,1,3,0.5,0,0
0,0,2,0,0,1,0.75,0,0
0,0,2,0,1,0,0.25,0,100
0,0,2,1,0,1,0.5,0,90
0,0,2,1,1,2,0.5,0,90
0,1,3,0,0,3,0.75,1,0
0,1,3,0,1,0,0.25,1,0
0,1,3,1,0,3,0.5,0,90
0,1,3,1,1,2,0.5,1,0
0,1,4,0,0,2,0.75,1,0
0,1,4,0,1,0,0.25,1,0
0,1,4,1,0,0,0.5,0,90
0,1,4,1,1,3,0.5,1,0
"""


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    file = tmp_path / "toy.csv"
    file.write_text(HEADER + ROWS)
    return file


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return save_npz(tmp_path / "toy.npz", toy_ids())


def toy_ids() -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    return np.argsort(rng.random((2, 600, 8)), axis=2)[:, :, :2].astype(np.int16)


def save_npz(file: Path, experts: Any, **changes: Any) -> Path:
    layers, _, top_k = experts.shape
    meta = {"model": "toy", "k": top_k, "num_experts": 8, "n_moe_layers": layers, **changes}
    np.savez(file, experts=experts, meta=json.dumps(meta))
    return file


# --- BigMoeOnEdge ---------------------------------------------------------------------------------


def test_bigmoeonedge_small(tmp_path: Path, csv: Path) -> None:
    trace = load(import_trace("bigmoeonedge", csv, tmp_path / "t"))
    assert check(tmp_path / "t").ok
    assert trace.geometry.expert_bytes == (100, 90)
    assert trace.geometry.top_k == 2
    assert trace.manifest.model["id"] == "toy.gguf"
    (gap,) = trace.manifest.gaps
    assert (gap.layer, gap.phase, gap.kept) == (1, Phase.PREFILL, Kept.LAST_TOKEN)
    assert trace.forwards.phase.tolist() == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert trace.forwards.tokens.tolist() == [3, 1, 1]
    assert trace.forwards.context.tolist() == [0, 3, 4]
    assert trace.forwards.produced.tolist() == [0, 1, 1]
    assert trace.tokens.position.tolist() == [0, 1, 2, 3, 4]
    rows = list(zip(*(c.tolist() for c in (trace.routing.layer, trace.routing.token)), strict=True))
    assert rows == [(0, 0), (0, 1), (0, 2), (1, 2), (0, 0), (1, 0), (0, 0), (1, 0)]
    assert trace.routing.expert_ids[:4].tolist() == [[3, 1], [2, 3], [1, 0], [1, 2]]
    assert trace.routing.weights[0].tolist() == [0.75, 0.25]
    steps = build_steps(trace)
    # token-major recency: 3 was seen last at token 1, slot 1
    assert steps.expert[:4].tolist() == [0, 1, 2, 3]
    assert steps.last_token[:4].tolist() == [5, 4, 2, 3]


def replace_line(number: int, text: str) -> str:
    lines = (HEADER + ROWS).splitlines()
    lines[number - 1] = text
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,expert\n", "line 1: not '# route_trace v1'"),
        (HEADER, "line 5: expected the columns"),
        (HEADER.replace("n_expert=4", "") + ROWS, "the header lacks n_expert="),
        (HEADER.replace("n_layer=2", "n_layer=3") + ROWS, "describes 2 layers, not 0 to 2"),
        (replace_line(8, "0,0,1,0,0,4,0.5,0,100"), r"line 8: expert 4 is not a whole number .* 3"),
        (replace_line(8, "0,0,1,2,0,3,0.5,0,100"), r"line 8: layer 2 .*\(layer 2\)"),
        (replace_line(8, "0,0,1,0,0,1.5,0.5,0,1"), "line 8: expert 1.5 is not a whole number"),
        (replace_line(8, "0,2,1,0,0,1,0.5,0,1"), "line 8: phase 2 is not a whole number"),
        (replace_line(8, "0,0,1,0,0,1,nan,0,1"), r"line 8: weight nan \(layer 0\)"),
        (replace_line(8, "0,0,1,0,0,x,0.5,0,1"), "line 8: '0,0,1,0,0,x,0.5,0,1' is not all"),
        (replace_line(21, "0,1,4,1,1"), "line 21: 5 values, not 9: cut off?"),
        (replace_line(9, "0,0,1,0,0,3,0.5,0,0"), "line 9: this slot occurs twice"),
        (HEADER + "\n".join(ROWS.splitlines()[:-2]), "step 4 has no rows of layer 1: cut off?"),
    ],
)
def test_bigmoeonedge_refusals(csv: Path, text: str, message: str) -> None:
    csv.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_source("bigmoeonedge", csv)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("qwen") / "t"
    return load(import_trace("bigmoeonedge", public("bigmoeonedge/qwen.route.csv"), folder))


def test_bigmoeonedge_public_file(qwen: Trace) -> None:
    assert check(qwen.path).ok
    assert len(qwen.routing.forward) == 156 * 48 - 27
    assert qwen.forwards.tokens.tolist() == [28] + [1] * 128
    assert sorted(set(qwen.geometry.expert_bytes)) == [2654208, 3059712]
    assert qwen.geometry.expert_bytes.count(3059712) == 24
    assert qwen.geometry.top_k == 6
    assert qwen.manifest.weight_kind is WeightKind.SUM_ONE
    assert qwen.manifest.confidence_kind is ConfidenceKind.NONE
    assert [(gap.layer, gap.kept) for gap in qwen.manifest.gaps] == [(47, Kept.LAST_TOKEN)]
    np.testing.assert_allclose(qwen.routing.weights.sum(axis=1), 1, atol=3e-6)


def test_bigmoeonedge_counts_accesses_as_its_authors_do(qwen: Trace) -> None:
    steps = build_steps(qwen)
    phase = np.repeat(steps.phase[steps.forward], np.diff(steps.offsets))
    assert (phase == Phase.PREFILL).sum() == 2662
    assert (phase == Phase.DECODE).sum() == 36864


# --- cacheable-by-design --------------------------------------------------------------------------


def test_cacheable_small(tmp_path: Path, npz: Path) -> None:
    trace = load(import_trace("cacheable_by_design", npz, tmp_path / "t"))
    report = check(tmp_path / "t")
    assert report.ok
    assert "weights" in report.notes[0]
    assert not trace.manifest.has_weights
    assert trace.num_forwards == 600
    assert set(trace.forwards.phase) == {Phase.DECODE}
    assert trace.tokens.position[[0, 511, 512, 599]].tolist() == [0, 511, 0, 87]
    ids = trace.routing.expert_ids.reshape(600, 2, 2).swapaxes(0, 1)
    np.testing.assert_array_equal(ids, toy_ids())


def test_cacheable_refusals(tmp_path: Path) -> None:
    ids = toy_ids()
    for changed, changes, message in (
        (np.where(ids == 7, 9, ids), {}, r"experts\[\d+, \d+, \d\] is 9; meta says 8 experts"),
        (-ids, {}, "is -"),
        (ids, {"n_moe_layers": 3}, r"must be \(layers 3"),
        (ids, {"k": "two"}, "'k' must be int, found 'two'"),
    ):
        file = save_npz(tmp_path / "bad.npz", changed, **changes)
        with pytest.raises(TraceError, match=message):
            read_source("cacheable_by_design", file)
    np.savez(tmp_path / "bad.npz", other=ids)
    with pytest.raises(TraceError, match="expected experts and meta"):
        read_source("cacheable_by_design", tmp_path / "bad.npz")
    np.savez(tmp_path / "bad.npz", experts=np.array([{}], dtype=object), meta="{}")
    with pytest.raises(TraceError, match="not readable as NPZ"):
        read_source("cacheable_by_design", tmp_path / "bad.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK")
    with pytest.raises(TraceError, match="not readable as NPZ"):
        read_source("cacheable_by_design", tmp_path / "bad.npz")


def test_cacheable_public_file(tmp_path: Path) -> None:
    source = public("cacheable_by_design/code.npz")
    trace = load(import_trace("cacheable_by_design", source, tmp_path / "t"))
    with np.load(source, allow_pickle=False) as data:
        experts = data["experts"]
    assert experts.shape == (48, 8000, 8)
    ids = trace.routing.expert_ids.reshape(8000, 48, 8).swapaxes(0, 1)
    np.testing.assert_array_equal(ids, experts)
    steps = build_steps(trace)
    assert (np.diff(steps.offsets) == 8).all()
    used = [len(np.unique(layer)) for layer in experts]
    assert min(used) == 107


# --- the registry ---------------------------------------------------------------------------------


def test_unknown_formats_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no format 'bigmoe' to import; did you mean 'bigmoeon"):
        read_source("bigmoe", tmp_path)
    for name in IMPORTERS:
        with pytest.raises(TraceError, match="no such file"):
            read_source(name, tmp_path / "nothing")


# --- policies that need what is lacking -----------------------------------------------------------


def made(tmp_path: Path, **changes: Any) -> Path:
    about = manifest(geometry(), **changes)
    return write(tmp_path / "t", about, diffusion(geometry()))


@pytest.mark.parametrize(
    ("changes", "policy", "message"),
    [
        ({"lacks": ("confidence",)}, "oled_priority", r"needs token confidence; .*policy=gate_sum"),
        ({"lacks": ("confidence",)}, "oled", "policy 'oled' needs token confidence"),
        ({"lacks": ("confidence",)}, "gate_sum", None),
        ({"ordered": False}, "lru", "policy 'lru' needs the order of forwards; trace 't' has none"),
        ({"ordered": False}, "oracle", "policy 'oracle' needs the order of forwards"),
        ({"ordered": False}, "static_popularity", None),
        ({"ordered": False}, "cpu_all", None),
        ({"ordered": False}, "llama_cpp", None),
        ({"ordered": False}, "llama_cpp_cache", "policy 'llama_cpp_cache' needs the order"),
        (
            {"weight_kind": WeightKind.NONE},
            "gate_sum",
            "needs gate weights; .*as lru",
        ),
        ({"weight_kind": WeightKind.NONE}, "lru", None),
        ({}, "mrs", "policy 'mrs' needs router scores of all experts"),
    ],
)
def test_policies_refuse_by_name(tmp_path: Path, changes, policy, message) -> None:
    source = made(tmp_path, **changes)
    if message is None:
        assert not load_composition(policy).needs & PreparedTrace.of(source).lacks
    else:
        with pytest.raises(UserError, match=message):
            simulate(source, policy, slots=4)
