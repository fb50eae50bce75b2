"""`oled reproduce field --small`: every fifth row of the committed tables, from start to page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oled.bundled.studies.field import DATA, judged, split_of
from oled.field.tables import read_rows
from oled.studies.reproduce import reproduce

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    return reproduce("field", tmp_path_factory.mktemp("results"), small=True)


def test_it_writes_table_figure_and_page(made):
    folder, table = made
    assert {"field.png", "field.pdf", "table.md", "results.parquet"} <= {
        file.name for file in folder.iterdir()
    }
    page = (folder / "table.md").read_text(encoding="utf-8")
    assert "oled reproduce field --small" in page
    assert not re.search(r"\bnan\b|None", page)
    assert len(table) > 300


def test_every_group_has_a_verdict(made):
    folder, table = made
    page = (folder / "table.md").read_text(encoding="utf-8")
    for group in judged(table)["group"].unique():
        assert f"| {group} (" in page


def test_a_row_says_which_side_it_is_on_and_whose_fact_it_is(made):
    _, table = made
    assert set(table["split"]) == {"development", "judgement"}
    assert (table["source"] != "").all()


def test_both_halves_hold_every_form():
    for name, hosts in (("bench", DATA / "bench_hosts.csv"), ("users", None), ("published", None)):
        rows = read_rows(DATA / f"{name}.csv", hosts)
        assert {split_of(row) for row in rows} == {"development", "judgement"}


def test_the_data_are_documented():
    page = (DATA / "README.md").read_text(encoding="utf-8")
    for file in Path(DATA).glob("*"):
        assert f"`{file.name}`" in page or file.name == "README.md"


def test_the_page_quotes_the_committed_table():
    """Each row of docs/field.md's first table stands in the study's, name apart."""
    committed = (ROOT / "experiments" / "results" / "field" / "table.md").read_text("utf-8")
    page = (ROOT / "docs" / "field.md").read_text(encoding="utf-8")
    known = {tuple(cells(line)[1:7]) for line in committed.splitlines() if line.startswith("| ")}
    quoted = [
        cells(line) for line in page.splitlines() if re.search(r"\| (judge|develop)ment \|", line)
    ]
    assert len(quoted) == 9
    assert [row for row in quoted if tuple(row[1:7]) not in known] == []
    for text in re.findall(r"\d+ of\s+\d+", page[: page.index("## What was looked at")]):
        assert " ".join(text.split()) in committed or text == "14 of the 16"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]
