"""`oled reproduce field --small`: every fifth row of the committed tables, from start to page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oled.bundled.studies.field import DATA, judged, split_of
from oled.field.tables import read_rows
from oled.studies.reproduce import reproduce


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
