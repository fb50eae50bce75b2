"""The bundled traces: whole, small, apart from each other, and what their READMEs say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oled.paths import traces_dir
from oled.trace.check import check
from oled.trace.reader import load
from oled.trace.schema import Phase
from oled.trace.stats import stats

NAMES = ("demo", "calibration")
RELATIVES = ("tiny_untrained", "tiny_early", "tiny_late", "tiny_twin")


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


@pytest.mark.parametrize("name", RELATIVES)
def test_a_relative_is_whole_and_tiny(name: str) -> None:
    folder = traces_dir() / name
    assert check(folder).ok
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 300_000
    trace = load(folder)
    table = (folder.parent / "README.md").read_text(encoding="utf-8")
    assert f"| {trace.num_forwards} | {len(trace.routing.forward):,} |" in table
    assert trace.manifest.decode["mode"] == "forced"
    assert set(trace.forwards.phase) == (
        {Phase.PREFILL, Phase.DECODE}
        if name == "tiny_twin"
        else {Phase.PREFILL, Phase.DENOISE, Phase.COMMIT}
    )


def test_relatives_have_the_same_problems_and_not_those_of_the_other_traces() -> None:
    prompts = {
        name: {prompt["hash"] for prompt in load(traces_dir() / name).manifest.prompts}
        for name in (*NAMES, *RELATIVES)
    }
    assert len({frozenset(prompts[name]) for name in RELATIVES}) == 1
    assert not prompts["tiny_late"] & (prompts["demo"] | prompts["calibration"])


def test_training_moves_what_the_page_says_and_not_the_overlap_of_neighbours() -> None:
    found = {name: stats(traces_dir() / name) for name in RELATIVES[:3]}
    boundary = {name: one.boundary.after_denoise for name, one in found.items()}
    kept = {name: one.persistence.by_transition["masked_to_decoded"] for name, one in found.items()}
    assert boundary["tiny_late"].of_new.value > boundary["tiny_early"].of_new.value + 0.1
    assert kept["tiny_late"] > kept["tiny_early"] + 0.2
    assert found["tiny_untrained"].overlap[1].of_new.value > 0.7
