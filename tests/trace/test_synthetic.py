"""The made-up model: valid traces, the figures it was fitted to, determinism; and size (G12)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import geometry

from oled.trace import Phase, TraceError, TraceWriter, build_steps, load
from oled.trace.check import check
from oled.trace.stats import locality
from oled.trace.synthetic import (
    WIDE,
    Process,
    Workload,
    llada2_mini,
    synthetic,
    synthetic_manifest,
    synthetic_steps,
    synthetic_trace,
    write_synthetic,
)

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
    assert kept["masked_to_masked"] == pytest.approx(0.94, abs=0.02)
    assert kept["masked_to_decoded"] == pytest.approx(0.39, abs=0.04)
    assert kept["decoded_to_decoded"] == pytest.approx(0.98, abs=0.02)


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
