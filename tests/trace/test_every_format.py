"""One recording in each format, and what the documentation says that such a trace holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources import (
    EXPERTS,
    FACTS,
    LAYERS,
    count_record,
    physical_ids,
    routed,
    save_dump,
    save_stat,
    sglang_response,
    token_arrays,
    token_record,
    vllm_response,
    write_json,
    write_lines,
)
from test_flat_sources import LINES, PROMPT, TOKEN, activations
from test_importers import HEADER, ROWS, save_npz, toy_ids

from oled.trace import load
from oled.trace.check import check
from oled.trace.importers import IMPORTERS, import_trace
from tests.provides import assert_documented, documented

Made = tuple[Path, dict[str, Any]]
SHAPE = {"layers": LAYERS, "top_k": 2}


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def per_token(folder: Path) -> Made:
    records = [
        token_record(1, 0, physical_ids(rng(), 5, 2), [0, 1, 2, 3, 4], mode=1),
        token_record(2, 0, physical_ids(rng(), 1, 2), [5], mode=2),
    ]
    return save_dump(folder / "dump", 0, records), {**SHAPE, "expert_bytes": 1000}


def per_pass(folder: Path) -> Made:
    records = [count_record(number, 0, physical_ids(rng(), 5, 2)) for number in (1, 2)]
    return save_dump(folder / "dump", 0, records), {**SHAPE, "expert_bytes": 1000}


def stat(folder: Path) -> Made:
    counts = np.zeros((2, LAYERS, EXPERTS))
    counts[:, 1:, :4] = 1
    return save_stat(folder / "s.pt", counts), {**SHAPE, "expert_bytes": 1000}


def array(folder: Path, **options: Any) -> Made:
    np.save(folder / "r.npy", routed(rng(), 7))
    return folder / "r.npy", {**FACTS, **options}


def sglang_json(folder: Path) -> Made:
    response = sglang_response(routed(rng(), 7), prompt=4)
    return write_json(folder / "r.json", response), {**FACTS, **SHAPE}


def vllm_json(folder: Path) -> Made:
    ids = routed(rng(), 7)
    response = vllm_response(ids[:4].tolist(), ids[4:].tolist())
    return write_json(folder / "r.json", response), dict(FACTS)


def by_token(folder: Path, **changes: Any) -> Made:
    np.savez(folder / "r.npz", **token_arrays(**changes))
    return folder / "r.npz", {"expert_bytes": 1000}


def bigmoeonedge(folder: Path) -> Made:
    (folder / "r.csv").write_text(HEADER + ROWS)
    return folder / "r.csv", {}


def cacheable(folder: Path) -> Made:
    return save_npz(folder / "r.npz", toy_ids()), {}


def llama_cpp(folder: Path) -> Made:
    (folder / "r.csv").write_text(activations(PROMPT, TOKEN, TOKEN))
    return folder / "r.csv", {**FACTS, "top_k": 2, "layers": 4}


def lines(folder: Path, *, weights: bool) -> Made:
    kept = [{k: v for k, v in one.items() if weights or k != "gate_weights"} for one in LINES]
    return write_lines(folder / "r.jsonl", kept), {**FACTS, "layers": 10}


def ids_csv(folder: Path) -> Made:
    (folder / "r.csv").write_text("0,1,2,5\n0,2,3,4\n1,1,0,7\n1,2,6,1\n")
    return folder / "r.csv", {**FACTS, "token_column": 0, "layer_column": 1}


def batches(folder: Path) -> Made:
    made = [
        {"layer": la, "batch_id": b, "topk_experts": [[la, 7]]} for b in (0, 1) for la in (1, 2)
    ]
    return write_lines(folder / "r.jsonl", made), dict(FACTS)


def logits(folder: Path) -> Made:
    values = torch.randn(7, EXPERTS, generator=torch.Generator().manual_seed(0))
    torch.save({"router_logits": [None, values, values + 1]}, folder / "r.pt")
    return folder / "r.pt", {**FACTS, "top_k": 2, "scores": 4}


SOURCES: dict[str, tuple[str, Callable[[Path], Made]]] = {
    "`sglang_dump`, `per_token`": ("sglang_dump", per_token),
    "`sglang_dump`, `per_pass`": ("sglang_dump", per_pass),
    "`sglang_dump`, `stat`": ("sglang_dump", stat),
    "`sglang_routed_experts`, array": ("sglang_routed_experts", array),
    "`sglang_routed_experts`, response": ("sglang_routed_experts", sglang_json),
    "`vllm_routed_experts`, array": ("vllm_routed_experts", array),
    "`vllm_routed_experts`, array and `prompt=`": (
        "vllm_routed_experts",
        lambda folder: array(folder, prompt=4),
    ),
    "`vllm_routed_experts`, response": ("vllm_routed_experts", vllm_json),
    "`token_arrays`": ("token_arrays", by_token),
    "`token_arrays` without `w` and `phase`": (
        "token_arrays",
        lambda folder: by_token(folder, w=None, phase=None),
    ),
    "`bigmoeonedge`": ("bigmoeonedge", bigmoeonedge),
    "`cacheable_by_design`": ("cacheable_by_design", cacheable),
    "`llama_cpp`": ("llama_cpp", llama_cpp),
    "`plain_csv` with both columns": ("plain_csv", ids_csv),
    "`topk_experts`": ("topk_experts", batches),
    "`jsonl` with gate weights": ("jsonl", lambda folder: lines(folder, weights=True)),
    "`jsonl` without": ("jsonl", lambda folder: lines(folder, weights=False)),
    "`router_logits` with `scores=`": ("router_logits", logits),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_holds_what_is_documented(source: str, tmp_path: Path) -> None:
    name, make = SOURCES[source]
    file, options = make(tmp_path)
    folder = import_trace(name, file, tmp_path / "t", options)
    report = check(folder)
    assert report.ok, report.lines()
    assert_documented(source, load(folder))


def test_no_format_is_forgotten() -> None:
    assert {name for name, _ in SOURCES.values()} == set(IMPORTERS)
    assert {source for source in documented() if source in SOURCES} == set(SOURCES)
