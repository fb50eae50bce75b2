"""The results table: what is a row, what is not, and that a reader never sees half a file."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from oled.errors import UserError
from oled.results import table as results

CONFIG = {
    "trace": {"path": "demo"},
    "policy": {"name": "lru"},
    "cache": {"slots": 8, "scope": "layer", "staging": 8, "lifecycle": "request"},
    "workload": {"batch_size": 1},
    "hardware": {"name": "machine"},
    "runtime": {"name": "graph_fused"},
    "cost": {"geometry": None, "cpu_kernel": "tuned", "pinned": True},
    "seed": 0,
}


def job(sweep: Path, number: int, overrides: list[str], error: str | None = None) -> Path:
    """A job's folder as Hydra and the job leave it."""
    folder = sweep / str(number)
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    results.write_json(folder / results.JOB, {"error": error})
    return folder


def metrics(folder: Path, tpot_ns: float) -> None:
    results.write_json(
        folder / results.METRICS, {"tpot_ns": tpot_ns, "phases": {"denoise": {"hits": 3}}}
    )


def test_a_failed_job_is_a_row_with_its_overrides_and_no_metrics(tmp_path):
    metrics(job(tmp_path, 0, ["cache.slots=8"]), 1.0)
    broken = job(tmp_path, 1, ["cache.slots=9"], error="no room")
    metrics(broken, 2.0)  # written before it failed
    (broken / ".metrics.json.17").write_text('{"tpot_ns": ')  # half a file
    metrics(job(tmp_path, 2, ["cache.slots=10"]), 3.0)

    table = results.gather_sweep(tmp_path)

    assert table["overrides"].tolist() == ["cache.slots=8", "cache.slots=9", "cache.slots=10"]
    assert table["error"].fillna("").tolist() == ["", "no room", ""]
    assert table["tpot_ns"].isna().tolist() == [False, True, False]
    assert table["phases.denoise.hits"].tolist()[::2] == [3, 3]
    assert results.read_table(tmp_path)["tpot_ns"].tolist() == [1.0, 3.0]


def test_a_job_that_was_killed_is_a_failed_row(tmp_path):
    folder = job(tmp_path, 0, [])
    (folder / results.JOB).unlink()
    assert results.gather_sweep(tmp_path)["error"].tolist() == ["the job did not end"]


def test_jobs_are_ordered_by_number(tmp_path):
    for number in reversed(range(11)):
        metrics(job(tmp_path, number, []), float(number))
    assert results.gather_sweep(tmp_path)["job"].tolist() == list(range(11))


def test_a_job_of_which_nothing_is_left_is_a_failed_row(tmp_path):
    lost = job(tmp_path, 1, ["cache.slots=9"])
    (lost / ".hydra" / "overrides.yaml").unlink()
    metrics(job(tmp_path, 3, ["cache.slots=10"]), 1.0)

    table = results.gather_sweep(tmp_path)

    assert table["job"].tolist() == [0, 1, 2, 3]
    assert table["error"].notna().tolist() == [True, True, True, False]


def test_an_older_sweep_is_cleared_and_other_files_stay(tmp_path):
    metrics(job(tmp_path, 0, []), 1.0)
    (tmp_path / "0" / "notes.txt").write_text("mine")
    (tmp_path / "5").mkdir()
    results.write_json(tmp_path / "5" / results.METRICS, {})  # not a job's folder
    results.gather_sweep(tmp_path)

    results.clear_sweep(tmp_path)

    left = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file())
    assert left == ["0/.hydra/config.yaml", "0/notes.txt", "5/metrics.json"]


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
