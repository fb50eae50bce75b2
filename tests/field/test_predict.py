"""Predictions from tables: blind to what was measured, and honest about what they cannot do."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pandas as pd
import pytest

from oled.bundled.studies.field import DATA, split_of
from oled.errors import UserError
from oled.field.judge import errors, signs, summary
from oled.field.predict import predict, table, write
from oled.field.tables import HIDDEN, read_rows

TABLES = {"bench": "bench_hosts.csv", "users": None, "published": None}


def some(name: str, folder: Path, change=lambda rows: None) -> list:
    """Every ninth row of a committed table, changed."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as text:
        rows = list(csv.DictReader(text))[::9]
    change(rows)
    file = folder / f"{name}.csv"
    with file.open("w", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    hosts = TABLES[name]
    return read_rows(file, DATA / hosts if hosts else None)


def scrambled(rows: list[dict[str, str]]) -> None:
    rng = random.Random(0)
    for column in set(HIDDEN) & set(rows[0]) - {"note"}:
        for row in rows:
            row[column] = str(rng.uniform(0.1, 1e4))


def emptied(rows: list[dict[str, str]]) -> None:
    for row in rows:
        row |= dict.fromkeys(set(HIDDEN) & set(row) - {"note"}, "")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("change", [scrambled, emptied])
def test_what_was_measured_is_not_looked_at(name, change, tmp_path):
    columns = ["id", "predicted", "low", "high", "reason"]
    plain = table(predict(some(name, tmp_path)))[columns]
    other = table(predict(some(name, tmp_path, change)))[columns]
    assert plain["predicted"].notna().sum() >= 5
    pd.testing.assert_frame_equal(plain, other)


def test_a_row_has_a_prediction_inside_its_interval_or_a_reason(tmp_path):
    for name in TABLES:
        for p in predict(some(name, tmp_path)):
            if p.predicted is None:
                assert p.reason
                assert p.low is p.high is None
            else:
                assert not p.reason
                assert p.low <= p.predicted <= p.high


def test_the_file_has_the_columns_that_were_promised(tmp_path):
    found = predict(some("users", tmp_path))
    file = write(found, tmp_path / "out")
    read = pd.read_csv(file)
    assert list(read) == ["id", "group", "measured", "predicted", "low", "high", "unit", "reason"]
    assert len(read) == len(found)
    assert "rows predicted" in summary(found)


def test_errors_are_of_time_whatever_the_unit(tmp_path):
    """Half the speed is twice the time: an error of +100 %."""
    rows = some("users", tmp_path)
    found = next(p for p in predict(rows) if p.predicted)

    def double(all_rows):
        for row in all_rows:
            row["decode_tps"] = str(2 * found.predicted)

    again = next(p for p in predict(some("users", tmp_path, double)) if p.row.id == found.row.id)
    assert again.time_error == pytest.approx(1.0)


def test_the_bench_is_predicted_as_well_as_docs_say():
    """Judged machines only, every policy; docs/field.md has the whole table."""
    rows = read_rows(DATA / "bench.csv", DATA / "bench_hosts.csv")
    judged = [r for r in rows if split_of(r) == "judgement" and r.facts["family"] == "consumer"]
    found = errors(predict(judged[::2]))
    own = found[found["kind"] == "bench, consumer"]["time_error"].abs()
    assert own.median() <= 0.035
    assert own.quantile(0.9) <= 0.12


@pytest.mark.parametrize(
    ("column", "text", "reason"),
    [
        ("moe_layers", "", "moe_layers is not stated"),
        ("misses_per_token", "many", "misses_per_token is 'many', not a number"),
        ("top_k", "0", "top_k is '0', not a number above 0"),
        ("bytes_per_expert", "-1", "bytes_per_expert is '-1', not a number above 0"),
    ],
)
def test_a_row_that_cannot_be_predicted_leaves_the_others_alone(column, text, reason, tmp_path):
    def change(rows):
        rows[3][column] = text

    plain, found = (predict(some("bench", tmp_path, *how)) for how in ((), (change,)))
    assert found[3].reason == reason
    assert [p.predicted for p in found[4:]] == [p.predicted for p in plain[4:]]


def test_a_table_may_lack_columns(tmp_path):
    file = tmp_path / "small.csv"
    file.write_text(
        "id,group,model,software,gpu,experts_on_gpu,experts_elsewhere,quant,ram\n"
        "a,g,Qwen3-30B-A3B,llama.cpp,RTX 4090,n-cpu-moe 20,cpu,Q8_0,2x32GB DDR5-6000\n"
    )
    [found] = predict(read_rows(file))
    assert found.predicted
    assert found.row.measured is None


def test_signs_count_pairs_of_one_host_model_and_budget():
    measured = {"measured_ms": [10.0, 12.0, 10.1, 30.0], "predicted_ms": [11.0, 10.0, 9.0, 1.0]}
    same = {"policy": list("abcd"), "group": ["h"] * 4, "model": ["m"] * 4, "budget": list("1112")}
    assert signs(pd.DataFrame(measured | same)) == (1, 2)  # (b, c) right; a and c differ by 1 %


def test_the_split_is_the_one_that_the_seed_draws():
    split = json.loads((DATA / "split.json").read_text(encoding="utf-8"))
    for part in (*split["bench"].values(), split["users"], split["published"]):
        names = sorted(part["development"] + part["judgement"])
        random.Random(split["seed"]).shuffle(names)
        half = (len(names) + 1) // 2
        assert sorted(names[:half]) == part["development"]
        assert sorted(names[half:]) == part["judgement"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("id,group\na,b\n", "has the columns of none of the forms"),
        (
            "id,group,model,software,gpu,experts_on_gpu,experts_elsewhere,decode_tps\n"
            "a,g,m,s,u,x,cpu,fast\n",
            "line 2: decode_tps is 'fast', not a number",
        ),
        (
            "id,group,model,software,gpu,experts_on_gpu,experts_elsewhere,decode_tps\n"
            "a,g,m,s,u,x,cpu,1\na,g,m,s,u,x,cpu,1\n",
            "line 3: id 'a' is empty or stands twice",
        ),
    ],
)
def test_a_table_that_cannot_be_read_says_where(text, message, tmp_path):
    file = tmp_path / "table.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_rows(file)


def test_a_host_that_is_not_there_is_named(tmp_path):
    hosts = tmp_path / "hosts.csv"
    hosts.write_text("host,gpu\nother,RTX 5090\n")
    with pytest.raises(UserError, match="is not in the hosts table"):
        read_rows(DATA / "bench.csv", hosts)
