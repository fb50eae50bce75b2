"""Studies: a small one from sweep to page, verdicts by one rule, and the report of a folder."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from oled.errors import UserError
from oled.paths import studies
from oled.results import table as results
from oled.results.report import as_html, report
from oled.studies.reproduce import (
    DIRECTION,
    NOT,
    REPRODUCED,
    judge,
    judge_range,
    ratio_interval,
    reproduce,
)
from oled.sweeps import Workers

HERE = Workers(count=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small studies, run once."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OLED_CACHE", str(folder / "cache"))
        for name in ("fig18", "fig16"):
            _, table = reproduce(name, folder, small=True, workers=HERE)
            assert table["error"].isna().all()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig18", "fig16"])
def test_a_study_writes_table_figure_and_page(root: Path, name: str) -> None:
    names = {f"{name}.png", f"{name}.pdf", "table.md", "results.parquet"}
    assert names <= {file.name for file in (root / name).iterdir()}
    page = (root / name / "table.md").read_text()
    assert "## Ours beside the paper's" in page
    assert f"oled reproduce {name} --small" in page
    assert "trace `synthetic-llada2_mini" in page
    assert not re.search(r"\bnan\b|None", page)


@pytest.mark.slow
def test_a_faster_link_is_never_slower(root: Path) -> None:
    table = results.read_table(root / "fig18")
    links = table.dropna(subset="hardware.h2d_pinned")
    for _, rows in links.groupby(["trace", "policy", "slots"]):
        slow, fast = rows["tpot_ns"]
        assert fast <= slow


@pytest.mark.slow
def test_a_report_is_one_whole_page(root: Path) -> None:
    page = report(root).read_text()
    assert page.count("data:image/png;base64,") == 2
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", page)
    _Balanced().feed(page)


class _Balanced(HTMLParser):
    """Refuses elements closed in another order than they were opened."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_markdown_of_the_studies() -> None:
    text = (
        "# A <b>\n\n| x | y |\n| --- | --- |\n| 1 | `z` |\n| 2 |  |\n\n- one\n- *two*\n\n"
        "## [site](https://oled.test) a_b_c & <script>\n1. first\n   - inner\n"
    )
    assert "".join(line.strip() for line in as_html(text).splitlines()) == (
        "<h2>A &lt;b&gt;</h2>"
        "<table><thead><tr><th>x</th><th>y</th></tr></thead>"
        "<tbody><tr><td>1</td><td><code>z</code></td></tr><tr><td>2</td><td></td></tr></tbody>"
        "</table><ul><li>one</li><li><em>two</em></li></ul>"
        '<h3><a href="https://oled.test">site</a> a_b_c &amp; &lt;script&gt;</h3>'
        "<ol><li>first<ul><li>inner</li></ul></li></ol>"
    )


def test_a_folder_without_results_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no results"):
        report(tmp_path)


def test_verdicts() -> None:
    assert judge(0.2, 0.16) == REPRODUCED
    assert judge(0.2, 0.05) == DIRECTION
    assert judge(0.2, -0.05) == NOT
    assert judge_range((1.7, 8.0), (1.5, 30.0)) == DIRECTION
    assert judge_range((1.7, 8.0), (0.9, 8.0)) == NOT


def test_every_study_has_what_reproduce_needs() -> None:
    import importlib

    for name in studies():
        module = importlib.import_module(f"oled.bundled.studies.{name}")
        for part in ("TITLE", "rows", "draw", "summary", "claims"):
            assert hasattr(module, part), f"{name} has no {part}"


@pytest.mark.slow
def test_a_browser_shows_the_report(root: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [browser, *options, report(root).as_uri()], capture_output=True, text=True, timeout=60
    )
    assert "Ours beside the paper" in done.stdout


def test_a_ratio_in_pairs_by_hand() -> None:
    assert ratio_interval("[2, 4]", "[1, 2]") == (2.0, 2.0)
    assert ratio_interval("[5]", "[2]") == (2.5, 2.5)
    low, high = ratio_interval("[1, 3]", "[1, 1]")  # of two requests: 1, 2 or 3
    assert (low, high) == (1.0, 3.0)


@pytest.mark.slow
def test_a_study_is_drawn_again_from_its_rows(root: Path) -> None:
    before = {file.name: file.read_bytes() for file in (root / "fig18").iterdir()}
    (root / "fig18" / "fig18.png").unlink()
    reproduce("fig18", root, small=True, redraw=True)
    assert {file.name: file.read_bytes() for file in (root / "fig18").iterdir()} == before
