"""The made-up model: valid traces, the figures it was fitted to, determinism; and size (G12)."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import geometry

from oled.trace import Phase, TokenState, TraceError, TraceWriter, build_steps, load
from oled.trace.check import check
from oled.trace.stats import locality
from oled.trace.synthetic import (
    WIDE,
    Decoding,
    Process,
    Workload,
    kernels,
    llada2_mini,
    synthetic,
    synthetic_manifest,
    synthetic_steps,
    synthetic_trace,
    write_synthetic,
)
from oled.trace.synthetic.decode import Pass, decode
from oled.trace.synthetic.text import Text

TOY = geometry(16, layers=3)


def test_a_synthetic_trace_is_whole(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "t", TOY, Workload(requests=2, blocks=3, horizons=2))
    report = check(tmp_path / "t")
    assert report.ok, report.lines()
    trace = load(tmp_path / "t")
    made = synthetic_trace(TOY, Workload(requests=2, blocks=3, horizons=2))
    np.testing.assert_array_equal(trace.routing.expert_ids, made.routing.expert_ids)
    steps = build_steps(trace)
    assert steps.horizons == 2
    assert steps.produced.sum() == 2 * 3 * 16


def test_seeds_make_requests_and_models() -> None:
    workload = Workload(requests=1, blocks=1)
    base = synthetic_trace(TOY, workload)
    assert synthetic_trace(TOY, workload).hash == base.hash
    assert synthetic_trace(TOY, workload, seed=1).hash != base.hash
    assert synthetic_trace(TOY, workload, model_seed=1).hash != base.hash
    longer = synthetic_trace(TOY, replace(workload, requests=2))
    first = longer.forwards.request == 0
    np.testing.assert_array_equal(longer.forwards.accepted[first], base.forwards.accepted)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TraceError, match="multiple of the 8 groups"):
        synthetic_steps(geometry(12), Workload())
    with pytest.raises(TraceError, match="same number of experts"):
        synthetic_steps(geometry([16, 8]), Workload())
    for process, message in (
        (Process(dimensions=6), "no multiple of 4"),
        (Process(kept_groups=9), "9 of 8 groups"),
        (Process(groups=16, kept_groups=2), "hold fewer than the top 3"),
    ):
        with pytest.raises(TraceError, match=message):
            synthetic_trace(geometry(16, top_k=3), Workload(), process)


def test_token_by_token(tmp_path: Path) -> None:
    """A prefill that chooses the first token, then a forward for each but the last."""
    workload = Workload(requests=2, prompt_blocks=1, blocks=2, block_length=8, decoding=None)
    write_synthetic(tmp_path / "t", TOY, workload)
    report = check(tmp_path / "t")
    assert report.ok, report.lines()
    trace = load(tmp_path / "t")
    steps = build_steps(trace)
    decode = steps.phase == Phase.DECODE
    assert decode.sum() == 2 * 15
    assert (steps.tokens[decode] == 1).all()
    assert (steps.produced == decode).all()
    assert steps.context[decode].tolist() == 2 * list(range(8, 23))
    assert trace.manifest.decode == {"mode": "autoregressive"}
    assert locality(trace).chain == "decode"


EDITING = Decoding(threshold=0.5, edit_threshold=0.0)


def passes(decoding: Decoding, blocks: int = 40) -> list[list[Pass]]:
    rng = np.random.default_rng(0)
    text = Text(Process(), 16, rng)
    return [list(decode(text.next_block(), Process(), decoding, rng)) for _ in range(blocks)]


def test_tokens_above_the_threshold_are_accepted_and_one_at_least() -> None:
    for block in passes(Decoding()):
        for one in block[:-1]:
            sure = one.masked & (one.confidence > 0.95)
            best = np.argmax(np.where(one.masked, one.confidence, -1))
            expected = sure if sure.any() else np.arange(16) == best
            np.testing.assert_array_equal(one.accepted, expected)
        assert sum(one.accepted.astype(int) for one in block).tolist() == [1] * 16
        assert [one.is_commit for one in block] == [False] * (len(block) - 1) + [True]
        assert not any(one.edited.any() for one in block)


def test_editing_writes_decoded_tokens_anew() -> None:
    blocks = passes(EDITING)
    edited = sum(int(one.edited.sum()) for block in blocks for one in block)
    assert 0 < edited < 40 * 16 / 4
    for block in blocks:
        assert not any((one.edited & one.masked).any() for one in block)
        assert block[-1].is_commit
        assert not any(one.is_commit for one in block[:-1])
    assert any(not one.masked.any() and one.edited.any() for block in blocks for one in block)
    none = replace(EDITING, post_edits=0)
    assert all(one.masked.any() or one.is_commit for block in passes(none) for one in block)


def test_an_edited_token_is_about_something_else() -> None:
    rng = np.random.default_rng(0)
    text = Text(Process(), 16, rng)
    for _ in range(10):
        block = text.next_block()
        before, edited = block.content.copy(), np.zeros(16, dtype=bool)
        for one in decode(block, Process(), EDITING, rng):
            np.testing.assert_array_equal((block.content != before).any(axis=1), edited)
            before, edited = block.content.copy(), one.edited


@pytest.mark.parametrize("decoding", [Decoding(threshold=0.5), EDITING], ids=["kept", "edited"])
def test_without_noise_only_edited_tokens_change_their_experts(decoding: Decoding) -> None:
    workload = Workload(requests=4, blocks=4, decoding=decoding)
    records = list(synthetic(TOY, workload, Process(noise=0.0)))
    changed = 0
    for old, new in itertools.pairwise(records):
        if old.phase is Phase.DENOISE:
            decoded = old.state == TokenState.DECODED
            changed += int((old.expert_ids != new.expert_ids)[:, decoded].any(axis=(0, 2)).sum())
    assert (changed > 0) == (decoding is EDITING)


def by_hand(row: np.ndarray, groups: int, kept: int, top_k: int) -> list[int]:
    """Group-limited top-k as its definition says, ties to the lower id."""
    size = len(row) // groups
    gate = 1 / (1 + np.exp(-row.astype(np.float64)))
    score = [np.sort(gate[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
    is_open = sorted(range(groups), key=lambda g: (-score[g], g))[:kept]
    members = [e for g in is_open for e in range(g * size, (g + 1) * size)]
    return sorted(members, key=lambda e: (-row[e], e))[:top_k]


@pytest.mark.parametrize(
    ("groups", "kept", "top_k", "softmax"),
    [(8, 4, 8, False), (8, 2, 8, False), (8, 8, 3, False), (1, 1, 8, True), (16, 3, 1, False)],
)
def test_the_router_by_its_definition(groups: int, kept: int, top_k: int, softmax: bool) -> None:
    logits = np.random.default_rng(0).standard_normal((6, 5, 64)).astype(np.float32)
    logits[:2] = np.round(logits[:2], 1)  # ties
    ids = np.empty((5, 6, top_k), dtype=np.uint16)
    weights = np.empty((5, 6, top_k), dtype=np.float32)
    kernels.route(logits, groups, kept, softmax, 2.5, ids, weights)
    for token, layer in np.ndindex(6, 5):
        row, chosen = logits[token, layer], ids[layer, token]
        assert chosen.tolist() == by_hand(row, groups, kept, top_k)
        gate = np.exp(row[chosen]) if softmax else 1 / (1 + np.exp(-row[chosen]))
        np.testing.assert_allclose(weights[layer, token], 2.5 * gate / gate.sum(), rtol=1e-5)


def test_products_are_the_same_compiled_or_not() -> None:
    rng = np.random.default_rng(0)
    left = rng.standard_normal((3, 8)).astype(np.float32)
    right = rng.standard_normal((8, 20)).astype(np.float32)
    compiled, plain = np.empty((3, 20), np.float32), np.empty((3, 20), np.float32)
    kernels.multiply(left, right, compiled)
    kernels.multiply.py_func(left, right, plain)
    np.testing.assert_array_equal(compiled, plain)
    np.testing.assert_allclose(compiled, left @ right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softmax", [False, True])
def test_the_best_scores_are_the_routers(softmax: bool) -> None:
    logits = np.random.default_rng(0).standard_normal((4, 3, 32)).astype(np.float32)
    logits[0] = np.round(logits[0])  # ties
    gate = np.exp(logits.astype(np.float64))
    scores = gate / gate.sum(axis=-1, keepdims=True) if softmax else gate / (1 + gate)
    for kept in (1, 12, 32):
        ids = np.empty((3, 4, kept), dtype=np.uint16)
        values = np.empty((3, 4, kept), dtype=np.float32)
        kernels.best_scores(logits, softmax, ids, values)
        for token, layer in np.ndindex(4, 3):
            row = logits[token, layer]
            best = sorted(range(32), key=lambda e: (-row[e], e))[:kept]
            assert ids[layer, token].tolist() == best
            np.testing.assert_allclose(values[layer, token], scores[token, layer, best], rtol=1e-5)


def test_figures_of_llada2_mini() -> None:
    """What the fit gives, loosely: one seed, few requests (tests/studies has the targets)."""
    found = locality(synthetic_trace(llada2_mini(), Workload(requests=4, blocks=10)))
    assert found.active is not None
    assert found.tokens_per_forward is not None
    assert found.persistence is not None
    assert found.boundary is not None
    assert found.boundary.after_denoise is not None
    assert found.overlap[1].of_new.value == pytest.approx(0.86, abs=0.02)
    assert found.overlap[5].of_new.value == pytest.approx(0.57, abs=0.05)
    assert found.overlap[1].cosine.value == pytest.approx(0.973, abs=0.01)
    assert found.boundary.after_denoise.of_new.value == pytest.approx(0.76, abs=0.06)
    assert found.active.mean.value == pytest.approx(47.5, abs=4)
    assert found.tokens_per_forward.value == pytest.approx(2.45, abs=0.3)
    kept = found.persistence.by_transition
    assert kept["masked_to_masked"] == pytest.approx(0.9, abs=0.02)
    assert kept["masked_to_decoded"] == pytest.approx(0.44, abs=0.04)
    assert kept["decoded_to_decoded"] == pytest.approx(0.99, abs=0.02)


def test_the_benchmark_has_88_active_experts() -> None:
    found = locality(synthetic_trace(llada2_mini(), Workload(requests=2, blocks=6), WIDE))
    assert found.active is not None
    assert found.active.mean.value == pytest.approx(88, abs=2)
    assert found.overlap[1].of_new.value == pytest.approx(0.885, abs=0.015)


def test_forwards_are_streamed() -> None:
    forwards = synthetic(TOY, Workload(requests=10**6), Process())
    assert next(iter(forwards)).phase is Phase.PREFILL


# --- G12: two million rows ------------------------------------------------------------------------

PEAK = """
def peak():
    # of this program alone: ru_maxrss would count the parent's memory before the exec, too
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0])
"""

LOAD = """
import time
import numpy as np
from oled.trace import build_steps, load
start = time.process_time()
trace = load({folder!r})
seconds = time.process_time() - start
counts = np.bincount(trace.routing.expert_ids.ravel(), minlength=256)
steps = build_steps(trace)
stepped = np.bincount(steps.expert, weights=steps.count, minlength=256).astype(int)
print(len(trace.routing.forward), seconds, peak(), *counts, *stepped)
"""

CHECK = """
from oled.trace.check import check
report = check({folder!r})
print(report.ok, report.routing_rows, peak())
"""


def run(code: str, folder: Path) -> list[str]:
    command = [sys.executable, "-c", PEAK + code.format(folder=str(folder))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_g12_two_million_rows(tmp_path: Path) -> None:
    """A short recording many times over; peaks are resident KiB, libraries included."""
    shape = llada2_mini()
    workload = Workload(requests=2, blocks=8)
    once = list(synthetic(shape, workload, WIDE))
    manifest = synthetic_manifest(shape, workload, WIDE, seed=0, model_seed=0)
    rows, turns = 0, 0
    with TraceWriter(tmp_path / "t", manifest) as writer:
        while rows < 2_000_000:
            for one in once:
                request, pass_id = one.request + 2 * turns, one.pass_id + len(once) * turns
                writer.append(replace(one, request=request, pass_id=pass_id))
                rows += 19 * len(one.positions)
            turns += 1
    found, seconds, peak, *counts = run(LOAD, tmp_path / "t")
    assert int(found) == rows
    assert float(seconds) < 5  # of CPU; 0.5 on a quiet machine
    assert int(peak) < 1 << 20
    brute = np.bincount(np.concatenate([one.expert_ids.ravel() for one in once]), minlength=256)
    for half in (counts[:256], counts[256:]):
        assert [int(count) for count in half] == (turns * brute).tolist()
    ok, found, peak = run(CHECK, tmp_path / "t")
    assert (ok, int(found)) == ("True", rows)
    assert int(peak) < 1 << 19
