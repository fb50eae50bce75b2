"""Figures: the same bytes each time, one look a policy, and only what the table holds."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest

style = importlib.import_module("oled.bundled.plots.style")
fig05 = importlib.import_module("oled.bundled.plots.fig05")
locality = importlib.import_module("oled.bundled.plots.locality")


def table(references: bool = True) -> pd.DataFrame:
    rows = []
    for slots in ("20", "50"):
        for place, policy in enumerate(("lru", "oled_priority", "a_policy_of_mine"), start=1):
            row = {
                "policy": policy,
                "slots": slots,
                "tpot_ns": 2e6 * place,
                "hit_rate": 0.2 * place,
            }
            if references:
                row |= {f"{name}_tpot_ns": 1e6 for name in style.REFERENCES}
                row["ref_belady_uniform_hit_rate"] = 0.9
            rows.append(row)
    return pd.DataFrame(rows)


def digests(folder: Path) -> list[str]:
    files = style.save(fig05.draw(table()), folder, "fig05")
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_the_same_table_gives_the_same_bytes(tmp_path):
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_the_users_own_settings_change_nothing_and_are_left_alone(tmp_path):
    before = digests(tmp_path / "a")
    with mpl.rc_context({"font.size": 20, "pdf.fonttype": 3}):
        assert digests(tmp_path / "b") == before
        assert mpl.rcParams["font.size"] == 20


def test_pdf_text_stays_text(tmp_path):
    style.save(fig05.draw(table()), tmp_path, "fig05")
    pdf = (tmp_path / "fig05.pdf").read_bytes()
    assert b"/Type42" in pdf or b"/CIDFontType2" in pdf
    assert b"CreationDate" not in pdf


def test_every_policy_looks_different():
    looks = [(look.color, look.hatch) for look in style.POLICIES.values()]
    assert len(set(looks)) == len(looks)
    labels = [look.label for look in style.POLICIES.values()]
    assert len(set(labels)) == len(labels)


def test_a_policy_of_the_users_has_a_look_by_its_name():
    assert style.look("a_policy_of_mine") == style.look("a_policy_of_mine")
    assert style.look("a_policy_of_mine").label == "a_policy_of_mine"


def lightness(color: str) -> float:
    red, green, blue = mpl.colors.to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_policies_of_the_demo_differ_without_colour():
    from oled.studies.demo import POLICIES

    looks = [style.look(policy) for policy in POLICIES]
    for at, one in enumerate(looks):
        for other in looks[at + 1 :]:
            apart = abs(lightness(one.color) - lightness(other.color))
            assert apart > 0.06 or one.hatch != other.hatch, (one.label, other.label)


@pytest.mark.parametrize("study", ["fig15", "fig16", "fig17", "fig18"])
def test_lines_of_a_figure_differ_without_colour(study):
    module = importlib.import_module(f"oled.bundled.studies.{study}")
    policies = getattr(module, "POLICIES", None) or module.RETENTIONS[:-1]
    looks = [style.look(policy) for policy in policies]
    for at, one in enumerate(looks):
        for other in looks[at + 1 :]:
            apart = abs(lightness(one.color) - lightness(other.color))
            assert one.marker != other.marker or apart > 0.2, (one.label, other.label)


@pytest.mark.parametrize("references", [True, False])
def test_references_are_drawn_where_the_table_has_them(references):
    figure = fig05.draw(table(references))
    upper, lower = figure.axes[0], figure.axes[2]
    assert len(upper.lines) == (len(style.REFERENCES) if references else 0)
    assert len(lower.lines) == (1 if references else 0)


def test_bars_begin_at_zero_and_follow_the_table():
    upper = fig05.draw(table()).axes[0]
    assert upper.get_ylim()[0] == 0
    assert [bar.get_height() for bar in upper.patches] == [2.0, 4.0, 6.0]


def test_a_configuration_that_is_missing_leaves_a_gap_only():
    figure = fig05.draw(table().drop(index=4))
    assert [len(axes.patches) for axes in figure.axes[:2]] == [3, 2]


@pytest.fixture(scope="module")
def seen() -> dict:
    from oled.paths import trace_path
    from oled.trace.stats import stats

    return stats(trace_path("demo")).to_json()


def test_locality_gives_the_same_bytes(seen, tmp_path):
    pngs = [style.save(locality.draw(seen), tmp_path / name, "seen")[0] for name in ("a", "b")]
    assert pngs[0].read_bytes() == pngs[1].read_bytes()


def test_locality_draws_a_control_where_there_is_one(seen):
    for control, labels in ((None, 3), (0.5, 4)):
        overlap = locality.draw(seen, control).axes[0]
        assert len(overlap.get_legend().get_texts()) == labels


def test_locality_of_a_trace_without_order_or_tokens(seen):
    bare = seen | {"overlap": {}, "boundary": None, "persistence": None, "active": None}
    texts = [text.get_text() for axes in locality.draw(bare).axes for text in axes.texts]
    assert len(texts) == 3
    assert all(text.startswith("no ") for text in texts)


def test_locality_of_one_request_has_no_intervals(seen):
    pair = seen["overlap"]["1"]
    alone = {side: pair[side] | {"low": None, "high": None} for side in locality.SIDES}
    figure = locality.draw(seen | {"overlap": {"1": pair | alone}, "boundary": None})
    assert len(figure.axes) == 4


@pytest.mark.parametrize("name", ["fig05", "locality"])
def test_a_figure_says_what_it_needs_and_what_it_shows(name):
    module = importlib.import_module(f"oled.bundled.plots.{name}")
    assert module.NEEDS
    assert module.__doc__.partition("\n")[0].endswith(".")


def test_what_a_sweep_varies_beside_the_size_has_panels_of_its_own():
    both = pd.concat([table().assign(staging=str(staging)) for staging in (8, 4)])
    titles = [axes.get_title() for axes in fig05.draw(both).axes[:4]]
    assert titles == [f"staging {s}\n{n} slots a layer" for s in (8, 4) for n in (20, 50)]
    with pytest.raises(ValueError, match="several rows for lru at"):
        fig05.draw(pd.concat([table(), table()]))
