"""The study of the other systems: nothing is left empty, and made-up heads are what they say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from oled.bundled.studies.recorded import problems
from oled.paths import traces_dir
from oled.record import overhead
from oled.studies.reproduce import reproduce
from oled.sweeps import Workers
from oled.trace import load
from oled.trace.synthetic import Synthetic

heads = importlib.import_module("oled.bundled.studies.synthetic_heads")
study = importlib.import_module("oled.bundled.studies.systems")

OF_THE_ISSUE = (
    *("saem", "saem_oracle", "temporal_router", "spatio_temporal_router", "spice", "spice_exact"),
    *("draftexpert", "pcomoe", "epic", "static_ep", "eplb", "des_seq", "des_vote", "block_pool"),
    *("lru", "inter_iteration", "oled", "oracle"),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    """The small preset, run once."""
    folder = tmp_path_factory.mktemp("systems")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OLED_CACHE", str(folder / "cache"))
        patch.chdir(folder)  # recordings go below the working directory
        patch.setattr(overhead, "MAX_PASSES", 4)  # of each recording's own cost
        return reproduce("systems", folder, small=True, workers=Workers(count=1))


@pytest.mark.slow
def test_every_system_ran(small: tuple[Path, pd.DataFrame]) -> None:
    table = small[1]
    assert table["error"].isna().all()
    assert (table["tpot_ns"] > 0).all()
    ran = table.groupby("system")["side"].unique().map(set)
    without_text = {name for name in study.SYSTEMS if name in study.RULES} | {"draftexpert"}
    for system in OF_THE_ISSUE:
        assert "bundled model" in ran[system]
        assert ("synthetic" in ran[system]) != (system in without_text)
    for rule in study.RULES:
        assert ran[f"{rule}, replayed"] == {"bundled model", "synthetic"}


@pytest.mark.slow
def test_no_cell_is_empty(small: tuple[Path, pd.DataFrame]) -> None:
    page = (small[0] / "table.md").read_text(encoding="utf-8")
    assert not re.search(r"\bnan\b|None|<NA>", page)
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [cell for line in lines for cell in line[2:-2].split(" | ")]
    assert all(cell.strip() for cell in cells)
    of_systems = page[: page.index("## Ours beside")]
    for system in OF_THE_ISSUE:
        assert re.search(rf"\| {system}(, live)? \|", of_systems)


@pytest.mark.slow
def test_what_keeps_the_text_says_so_and_what_does_not_is_measured(
    small: tuple[Path, pd.DataFrame],
) -> None:
    recorded = study.by_cache(small[1])["bundled model", False].rows
    for system in (*study.RULES, "pcomoe", "spice"):
        assert 0 <= recorded.loc[system, "quality.same_tokens"] <= 1
        assert recorded.loc[system, "quality.bits_per_token"] > 0
    exact = [*study.PLAIN, *study.FORETOLD, "draftexpert"]
    exact.remove("spice")
    assert recorded.loc[exact, "quality.bits_per_token"].isna().all()
    assert recorded.loc["spice", "dropped_gate_share"] > 0
    assert recorded.loc["spice_exact", "dropped_gate_share"] == 0


@pytest.mark.slow
def test_references_are_below_all_systems_of_their_trace(small: tuple[Path, pd.DataFrame]) -> None:
    for side in study.by_cache(small[1]).values():
        kept = side.rows.drop(
            [name for name in side.rows.index if name in ("spice", "draftexpert")]
        )
        assert (kept["bound_relaxed_tpot_ns"] <= kept["tpot_ns"]).all()


def test_problems_are_those_of_the_bundled_traces_word_for_word() -> None:
    for name in ("demo", "calibration"):
        known = [prompt["hash"] for prompt in load(traces_dir() / name).manifest.prompts]
        found = problems(name)
        assert [prompt.sha256 for prompt in found] == known
        assert all(prompt.reference.startswith(" ") for prompt in found)
    assert len(known) == study.Size().prompts == study.Size().learned


SPEC = Synthetic(geometry="olmoe_1b_7b", requests=1, block_length=8)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory):
    """A small made-up trace without predictions, and with."""
    folder = tmp_path_factory.mktemp("heads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OLED_CACHE", str(folder / "cache"))
        return load(SPEC.folder()), load(heads.with_heads(SPEC, folder / "heads"))


@pytest.mark.slow
def test_predictions_change_nothing_else(headed) -> None:
    plain, foretold = headed
    assert np.array_equal(plain.routing.expert_ids, foretold.routing.expert_ids)
    assert np.array_equal(plain.routing.weights, foretold.routing.weights)
    assert np.array_equal(plain.tokens.confidence, foretold.tokens.confidence, equal_nan=True)
    assert plain.predictions is None
    assert set(foretold.predictions.names) == {"future_router", "spice"}


@pytest.mark.slow
def test_predicted_mass_is_a_share_of_each_token(headed) -> None:
    trace = headed[1]
    said = trace.predictions
    total = np.add.reduceat(said.scores.astype(np.float64), said.offsets[:-1])
    tokens = np.diff(trace.forwards.token_offsets)[said.forward]
    drafts = said.predictor == said.names.index("spice")
    share = total[drafts] / tokens[drafts]
    assert share.min() > 0
    assert share.max() <= 1 + 1e-5


def test_a_head_finds_what_is_linear() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((400, 1, 5))
    now = (hidden @ rng.standard_normal((5, 12))).astype(np.float32)
    then = (hidden @ rng.standard_normal((5, 12)) + 0.5).astype(np.float32)
    head = heads._temporal(now[:300], then[:300])
    np.testing.assert_allclose(heads.foretold(head, now[300:]), then[300:], atol=1e-3)


def test_the_best_of_each_token_are_added_up_by_hand() -> None:
    values = np.array([[[0.1, 0.7, 0.4]], [[0.6, 0.2, 0.3]]])  # two tokens, one layer
    np.testing.assert_allclose(heads.best(values, 2), [[0.6, 0.7, 0.7]])


def test_sharpness_is_where_the_divergence_is_least(monkeypatch: pytest.MonkeyPatch) -> None:
    model = heads._listening(SPEC)
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((40, len(model.layers), model.experts)).astype(np.float32)
    ids, weights = model.route(logits)
    record = type("Record", (), {"expert_ids": ids, "weights": weights})
    monkeypatch.setattr(model, "ahead", lambda heard, distance: heard[:, distance:])
    found = heads._sharpness(model, [(logits, record)], 1)

    def divergence(sharpness: float) -> float:
        scores = heads.sigmoid(logits[:, 1:]).swapaxes(0, 1).astype(np.float64)
        chosen = np.take_along_axis(
            np.log(heads.softmax(sharpness * scores)), ids[1:].astype(np.int64), axis=2
        )
        share = weights[1:] / weights[1:].sum(axis=2, keepdims=True)
        return -float((share * chosen).sum())

    assert divergence(found) < min(divergence(found * 0.95), divergence(found * 1.05))
