"""The results table: what is a row, what is not, and that a reader never sees half a file."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from oled.errors import UserError
from oled.results import table as results


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no results table"), (b"PAR1 no", "not readable as Parquet")],
)
def test_a_bad_table_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / results.TABLE).write_bytes(content)
    with pytest.raises(UserError, match=message):
        results.read_table(tmp_path)


def test_a_table_of_failures_only_is_refused(tmp_path):
    results.write_table([{"policy": "lru", "error": "no room"}], tmp_path / results.TABLE)
    with pytest.raises(UserError, match="no configuration in it succeeded"):
        results.read_table(tmp_path)


def test_nested_metrics_become_dotted_columns():
    assert results.flatten({"a": {"b": {"c": 1}}, "labels": ["x"]}) == {
        "a.b.c": 1,
        "labels": '["x"]',
    }


def test_files_are_written_whole(tmp_path):
    results.write_json(tmp_path / "a.json", {"b": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_tables_for_people():
    rows = [
        {"policy": p, "slots": s, "tpot_ns": t, "hit_rate": 0.5, "ideal_tpot_ns": 1e6}
        for p, s, t in (("lru", "8", 2e6), ("lru", "16", 1.5e6), ("oracle", "8", None))
    ]
    table = pd.DataFrame(rows)
    assert "2.000" in results.as_text(table)
    text = results.comparison(table)
    assert "8 slots" in text
    assert "16 slots" in text
    assert text.splitlines()[1].split() == [
        "lru",
        "2.000",
        "2.00",
        "0.500",
        "1.500",
        "1.50",
        "0.500",
    ]


def test_a_sweeps_table_says_what_was_stretched_and_what_to_add():
    labels = ["extrapolated: dense layers, weights: 1 to 2 were measured, 3 needed"]
    rows = [
        {"policy": "lru", "slots": s, "tpot_ns": 1e6, "provenance.labels": json.dumps(labels)}
        for s in (8, 20)
    ]
    text = results.as_text(pd.DataFrame(rows))
    assert f"note  {labels[0]} (2 of 2 rows)" in text
    assert "add cost.geometry=NAME" in text
    for row in rows:
        row["provenance.labels"] = "[]"
    assert "note" not in results.as_text(pd.DataFrame(rows))


def test_an_older_table_is_read_under_the_names_of_today(tmp_path, caplog):
    caplog.set_level("INFO", logger="oled")
    old = {"policy": "lru", "error": None, "ttft_ns": 5.0, "h2d_bytes_per_token": 7.0}
    results.write_table([old], tmp_path / results.TABLE)
    table = results.read_table(tmp_path)
    assert table["prefill_ns"].tolist() == [5.0]
    assert table["decode_h2d_bytes_per_token"].tolist() == [7.0]
    assert "ttft_ns" not in table
    assert "ttft_ns is read as prefill_ns" in caplog.text
