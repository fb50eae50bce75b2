"""From prompts to a trace that holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from oled.errors import UserError
from oled.record import (
    Autoregressive,
    BlockDiffusion,
    LoadedModel,
    Mode,
    plain_prompt,
    record,
)
from oled.record import run as run_module
from oled.trace.check import check
from oled.trace.manifest import Status, read_manifest
from oled.trace.reader import load
from oled.trace.schema import Phase, WeightKind
from tests.running.conftest import EOS, MASK

PROMPTS = [
    plain_prompt("How many pears?", " 33, she said."),
    plain_prompt("Trip", " 192 cars and a boat"),
    plain_prompt("A longer question about ferries", " 8"),
]
DECODE = BlockDiffusion(block_length=8, threshold=0.4, max_new_tokens=24)


def test_a_recording_is_a_complete_trace(loaded: LoadedModel, tmp_path: Path) -> None:
    report = record(
        loaded, PROMPTS, DECODE, tmp_path / "t", batch_size=2, horizons=4, score_width=5, seed=3
    )
    trace = load(tmp_path / "t", verify=True)
    manifest = trace.manifest
    assert check(tmp_path / "t").ok
    assert (manifest.status, manifest.seed) == (Status.COMPLETE, 3)
    assert (manifest.weight_kind, manifest.weight_sum) == (WeightKind.SCALED_SUM, 2.5)
    assert trace.requests == (0, 1, 2)
    assert [entry["hash"] for entry in manifest.prompts] == [p.sha256 for p in PROMPTS]
    assert manifest.decode["mask_id"] == MASK
    assert manifest.decode["eos_ids"] == [EOS]
    assert set(trace.geometry.moe_layers) == {1, 2, 3} == set(trace.routing.layer.tolist())
    assert trace.geometry.expert_bytes[0] == 2 * 3 * 32 * 16
    assert len(trace.routing.forward) == 3 * len(trace.tokens.position)
    assert trace.predictions is not None
    assert set(trace.predictions.target - trace.predictions.layer) == {1, 2}
    assert trace.scores is not None
    assert trace.scores.values.shape == (len(trace.routing.forward), 5)
    assert report.forwards == trace.num_forwards
    assert report.tokens == int(trace.forwards.produced.sum())
    assert report.overhead_fraction >= 0
    assert f"{report.tokens} tokens of 3 prompts" in str(report)


def test_recording_twice_gives_the_same_bytes(loaded: LoadedModel, tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(loaded, PROMPTS, DECODE, tmp_path / name, horizons=2, score_width=3)
    assert load(tmp_path / "a").hash == load(tmp_path / "b").hash


def test_forced_recordings_hold_the_reference(loaded: LoadedModel, tmp_path: Path) -> None:
    decode = BlockDiffusion(block_length=8, mode=Mode.FORCED, tokens_per_forward=2)
    record(loaded, PROMPTS, decode, tmp_path / "t")
    trace = load(tmp_path / "t")
    for request, prompt in enumerate(PROMPTS):
        forwards = np.flatnonzero(trace.forwards.request == request)
        assert trace.forwards.produced[forwards].sum() == len(str(prompt.reference)) + 1
        rows = np.concatenate(
            [np.arange(*trace.forwards.token_offsets[f : f + 2]) for f in forwards]
        )
        final = dict(zip(trace.tokens.position[rows], trace.tokens.token_id[rows], strict=True))
        text = loaded.tokenizer.decode([final[p] for p in sorted(final) if final[p] != EOS])
        assert text == f"{prompt.text}{prompt.reference}"


def test_an_autoregressive_recording(
    qwen: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    loaded = LoadedModel("q", qwen, tokenizer, torch.float32)
    report = record(loaded, PROMPTS, Autoregressive(max_new_tokens=6), tmp_path / "t", batch_size=3)
    assert check(tmp_path / "t").ok
    forwards = load(tmp_path / "t").forwards
    assert report.tokens == 15
    assert (forwards.phase == Phase.PREFILL).sum() == 3
    assert (forwards.tokens[forwards.phase == Phase.DECODE] == 1).all()
    assert len(set(forwards.pass_id.tolist())) == 6


def test_a_crash_leaves_a_partial_trace(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    plain = run_module.forward_records

    def failing(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise RuntimeError("out of memory")
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "forward_records", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        record(loaded, PROMPTS, DECODE, tmp_path / "t", rows_per_part=50)
    assert read_manifest(tmp_path / "t").status is Status.PARTIAL
    assert load(tmp_path / "t", allow_partial=True).num_forwards > 0
    with pytest.raises(UserError, match="partial"):
        load(tmp_path / "t")
    assert loaded.model.config._experts_implementation == "grouped_mm"


ENDLESS = """
import sys, torch
sys.path.insert(0, {folder!r})
from running.conftest import build
from record import conftest
from oled.record import BlockDiffusion, LoadedModel, overhead, plain_prompt, record
overhead.MAX_PASSES = 1
tokenizer = conftest.tokenizer.__wrapped__()
loaded = LoadedModel("random", build("llada2_moe"), tokenizer, torch.float16)
prompts = [plain_prompt(f"prompt number {{n}}") for n in range(100_000)]
decode = BlockDiffusion(block_length=8, threshold=0.9, max_new_tokens=60, eos_ids=())
record(loaded, prompts, decode, {out!r}, rows_per_part=100)
"""


def test_kill_leaves_the_closed_parts(tmp_path: Path) -> None:
    """G10: kill -9 in the middle of a recording."""
    out = tmp_path / "t"
    script = ENDLESS.format(folder=str(Path(__file__).parents[1]), out=str(out))
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        deadline = time.monotonic() + 300
        while len(list(out.glob("forwards-*.parquet"))) < 4 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(UserError, match=r"partial.*closed parts"):
        load(out)
    trace = load(out, allow_partial=True, verify=True)
    parts = [part for part in trace.manifest.parts if part.table == "forwards"]
    assert len(parts) >= 3
    assert trace.num_forwards == sum(part.rows for part in parts)
    assert np.isfinite(trace.routing.weights).all()


def test_a_second_recording_into_the_same_folder_is_refused(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    record(loaded, PROMPTS[:1], DECODE, tmp_path / "t")
    with pytest.raises(UserError, match="already holds a trace"):
        record(loaded, PROMPTS[:1], DECODE, tmp_path / "t")


def test_what_does_not_fit_the_model_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more than the model's 512 positions"):
        record(loaded, PROMPTS, BlockDiffusion(max_new_tokens=510), tmp_path / "t")
    with pytest.raises(UserError, match="batch_size is 0"):
        record(loaded, PROMPTS, DECODE, tmp_path / "t", batch_size=0)
    assert not (tmp_path / "t").exists()
