"""The committed results: figures and tables follow from their rows, and the pages quote them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from oled.paths import studies
from oled.results import table as results
from oled.studies.reproduce import page

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "experiments" / "results"
NOT_COMMITTED = ("rows.jsonl", "report.html")
LIMIT_BYTES = 20_000_000

style = importlib.import_module("oled.bundled.plots.style")


def test_they_are_small() -> None:
    files = [file for file in COMMITTED.rglob("*") if file.name not in NOT_COMMITTED]
    assert sum(file.stat().st_size for file in files) < LIMIT_BYTES


@pytest.mark.parametrize("name", studies())
def test_a_figure_is_the_same_bytes_each_time(name: str, tmp_path: Path) -> None:
    study = importlib.import_module(f"oled.bundled.studies.{name}")
    table = results.read_table(COMMITTED / name)
    files = [style.save(study.draw(table), tmp_path / again, name) for again in ("a", "b")]
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", studies())
def test_a_table_follows_from_its_rows(name: str) -> None:
    study = importlib.import_module(f"oled.bundled.studies.{name}")
    table = results.read_table(COMMITTED / name)
    committed = (COMMITTED / name / "table.md").read_text(encoding="utf-8")
    assert page(name, study, table, small=False) == committed, f"oled reproduce {name} --redraw"


NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")
NAMES = re.compile(r"LLaDA2\.\d|`[^`]*`|\]\([^)]*\)|fig\d\d")


QUOTES = ("(fig", "(loc", "(systems)")


def paragraphs() -> list[str]:
    """Of the pages that quote tables: what stands between blank lines, and each item of a list."""
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("results.md", "systems.md")]
    parts = re.split(r"\n\s*\n|\n(?=- )", "\n\n".join(pages))
    return [part for part in parts if any(quote in part for quote in QUOTES)]


@pytest.mark.parametrize("paragraph", paragraphs(), ids=lambda text: text[:40])
def test_what_the_page_quotes_stands_in_a_table_that_it_names(paragraph: str) -> None:
    named = set(re.findall(r"fig\d\d|locality|(?<=\()systems(?=\))", paragraph))
    tables = " ".join((COMMITTED / name / "table.md").read_text() for name in named)
    known = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", tables)}
    for text in NUMBER.findall(NAMES.sub(" ", paragraph)):
        places = len(text.partition(".")[2])
        quoted = {round(number, places) for number in known}
        assert float(text) in quoted, f"{text} is in no table of {', '.join(sorted(named))}"
