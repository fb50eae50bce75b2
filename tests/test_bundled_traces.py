"""The bundled traces: whole, small, apart from each other, and what their READMEs say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oled.paths import traces_dir
from oled.trace.check import check
from oled.trace.reader import load
from oled.trace.schema import Phase

NAMES = ("demo", "calibration")


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return traces_dir() / request.param


def test_a_bundled_trace_is_whole_and_small(folder: Path) -> None:
    assert check(folder).ok
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 3_000_000


def test_its_readme_names_it(folder: Path) -> None:
    trace = load(folder, verify=True)
    assert f"`{trace.hash}`" in (folder / "README.md").read_text(encoding="utf-8")
    table = (folder.parent / "README.md").read_text(encoding="utf-8")
    assert f"| {trace.num_forwards} | {len(trace.routing.forward):,} |" in table


def test_it_was_forced_with_everything_a_policy_may_need(folder: Path) -> None:
    trace = load(folder)
    assert trace.manifest.model["id"] == "tiny"
    assert trace.manifest.decode["mode"] == "forced"
    assert trace.manifest.decode["block_length"] == 16
    assert trace.predictions is not None
    assert set(trace.predictions.target - trace.predictions.layer) == {1, 2, 3}
    assert trace.scores is not None
    assert trace.scores.biased is not None
    assert len(trace.scores.forward) == len(trace.routing.forward)
    denoised = trace.forwards.phase == Phase.DENOISE
    assert trace.forwards.accepted[denoised].max() == 2
    in_blocks = np.repeat(trace.forwards.phase != Phase.PREFILL, trace.forwards.tokens)
    assert np.isfinite(trace.tokens.confidence[in_blocks]).all()


def test_calibration_and_demo_share_no_prompt() -> None:
    demo, calibration = (
        {prompt["hash"] for prompt in load(traces_dir() / name).manifest.prompts} for name in NAMES
    )
    assert len(demo) == len(calibration) == 9
    assert not demo & calibration
