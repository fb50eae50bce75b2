"""check, stats, list and plot on the bundled trace, for people and for scripts."""

from __future__ import annotations

import json
import shutil

import pytest

from oled.paths import trace_path


def test_check_finds_the_bundled_traces_whole(oled):
    done = oled("check", "demo", torch=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith("whole")
    assert json.loads(oled("check", "demo", "--json", torch=False).stdout)["ok"] is True


@pytest.mark.parametrize("name", ["gpt_oss_20b", "qwen36_35b", "qwen3_30b_phone", "qwen3_30b_code"])
def test_a_recording_of_a_full_size_model_is_listed_and_replayed(oled, tmp_path, name):
    assert f"\n{name} " in oled("list", "traces", torch=False).stdout
    done = oled("simulate", f"trace={name}", "policy=lru", "cache.slots=0.25", "out=run")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    assert 0 < metrics["hit_rate"] < 1


def test_check_names_what_is_wrong(oled, tmp_path):
    shutil.copytree(trace_path("demo"), tmp_path / "trace")
    (tmp_path / "trace" / "tokens-00000.parquet").write_bytes(b"PAR1")
    done = oled("check", "trace", torch=False)
    assert done.returncode == 1
    assert "tokens-00000.parquet" in done.stdout
    assert done.stderr == "oled: trace is not whole\n"
    assert json.loads(oled("check", "trace", "--json", torch=False).stdout)["ok"] is False


def test_stats_prints_and_draws(oled, tmp_path):
    done = oled("stats", "demo", torch=False)
    assert done.returncode == 0, done.stderr
    assert "gap 1" in done.stdout
    drawn = oled("stats", "demo", "--json", "--plot", "figures/seen.png", torch=False)
    assert json.loads(drawn.stdout)["overlap"]["1"]["pairs"] > 0
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == [
        "seen.pdf",
        "seen.png",
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("policies", "oled_priority"),
        ("hardware", "rtx5090_xeon8470q"),
        ("runtimes", "graph_fused"),
        ("models", "llada2_mini"),
        ("traces", "demo"),
        ("plots", "fig05"),
        ("formats", "bigmoeonedge"),
    ],
)
def test_lists(oled, kind, name):
    words = [line.split()[0] for line in oled("list", kind, torch=False).stdout.splitlines()]
    assert name in words
    rows = json.loads(oled("list", kind, "--json", torch=False).stdout)
    assert [row["name"] for row in rows] == words
    assert all(row["description"] for row in rows)


def test_policies_say_what_they_need_of_a_trace(oled):
    rows = {row["name"]: row for row in json.loads(oled("list", "policies", "--json").stdout)}
    assert "confidence" in rows["oled_priority"]["needs"]
    assert "confidence" not in rows["lru"]["needs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "modls"], "there is no list 'modls'; did you mean 'models'?"),
        (["plot", "localty", "x"], "there is no figure 'localty'; did you mean 'locality'?"),
    ],
)
def test_a_wrong_name_is_wrong_usage(oled, words, message):
    done = oled(*words, torch=False)
    assert (done.returncode, done.stderr) == (2, f"oled: {message}\n")


def test_a_figure_of_other_results_is_refused(oled, tmp_path):
    (tmp_path / "stats.json").write_text(oled("stats", "demo", "--json", torch=False).stdout)
    done = oled("plot", "fig05", "stats.json", torch=False)
    assert done.returncode == 1
    assert "figure fig05 needs policy" in done.stderr
    assert oled("plot", "locality", "stats.json", torch=False).returncode == 0


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    import subprocess
    import sys

    command = f"{sys.executable} -m oled.cli.main list hardware | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
