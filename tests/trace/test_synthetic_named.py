"""Synthetic traces by name: made once, named as what they are, of any geometry."""

from __future__ import annotations

from pathlib import Path

import pytest

from oled.errors import UserError
from oled.models.catalogue import MODELS
from oled.trace import Phase, build_steps, load
from oled.trace.check import check
from oled.trace.synthetic import Synthetic
from oled.trace.synthetic.named import geometry_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLED_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("geometry", "layers", "experts"), [("llada2_mini", 19, 256), ("sdar_30b", 48, 128)]
)
def test_a_named_trace_is_whole(geometry: str, layers: int, experts: int) -> None:
    spec = Synthetic(geometry=geometry, requests=1)
    assert check(spec.folder()).ok
    trace = load(spec.folder())
    assert trace.path is not None
    assert trace.path.name == spec.name == f"synthetic-{geometry}-b16-even-gsm8k-r1-s0-m0"
    steps = build_steps(trace)
    assert (steps.num_layers, set(steps.num_experts)) == (layers, {experts})
    assert steps.produced.sum() == 160
    assert steps.tokens[steps.phase == Phase.PREFILL].tolist() == [80]


@pytest.mark.parametrize("decoding", ["llada2_1_speed", "llada2_1_quality", "autoregressive"])
def test_other_ways_to_decode_say_so_in_their_name(decoding: str) -> None:
    spec = Synthetic(requests=1, block_length=32, decoding=decoding, scores=8, horizons=1)
    assert spec.name == f"synthetic-llada2_mini-b32-even-gsm8k-{decoding}-r1-s0-m0-h1-scores8"
    assert check(spec.folder()).ok
    trace = load(spec.folder())
    assert trace.scores is not None
    assert trace.scores.expert_ids.shape[1] == 8
    assert build_steps(trace).produced.sum() == 160 - (decoding == "autoregressive")


def test_gpqa_is_long_and_stays_small_with_some_scores(tmp_path: Path) -> None:
    """A router's 64 best of 256 scores; all of them would be four times as much."""
    spec = Synthetic(requests=1, workload="gpqa", scores=64, horizons=3)
    size = sum(file.stat().st_size for file in spec.folder().rglob("*") if file.is_file())
    assert size < 30e6


def test_it_is_made_once() -> None:
    spec = Synthetic(requests=1, block_length=32)
    made = spec.folder()
    before = (made / "trace.json").stat().st_mtime_ns
    assert (spec.folder() / "trace.json").stat().st_mtime_ns == before
    assert [path.name for path in made.parent.iterdir()] == [spec.name]


def test_calibration_is_the_same_model_on_other_requests() -> None:
    spec = Synthetic(model_seed=3, requests=20)
    other = spec.calibration()
    assert (other.model_seed, other.seed, other.requests) == (3, 1000, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"geometry": "llada"}, "llada"),
        ({"process": "evn"}, "did you mean 'even'"),
        ({"block_length": 0}, r"trace\.block_length=0"),
        ({"decoding": "llada2_2"}, "did you mean 'llada2'"),
        ({"scores": True}, r"trace\.scores=True: it must be a number"),
        ({"horizons": -1}, r"trace\.horizons=-1"),
    ],
)
def test_what_cannot_be_made_is_refused(fields, message) -> None:
    with pytest.raises(UserError, match=message):
        Synthetic(**fields)


def test_every_model_of_the_catalogue_has_a_geometry() -> None:
    for model in MODELS.values():
        geometry = geometry_of(model)
        assert geometry.name == model.name
        assert geometry.expert_bytes[0] == model.expert_bytes
