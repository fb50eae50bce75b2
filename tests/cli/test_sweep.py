"""`oled sweep`, `reproduce` and `report` as people type them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from oled.cli.studies import experiment

BAD = """\
hydra:
  sweeper:
    params:
      policy: cpu_all,lru,ktransformers
      cache.staging: 0
"""  # only those that copy nothing do without a staging slot


def test_a_failed_configuration_is_named_and_the_exit_code_is_1(oled, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(BAD)
    done = oled("sweep", "experiment=mine.yaml", "out=out", "sweep.workers=1", torch=False)
    assert done.returncode == 1, done.stderr
    assert "policy=lru cache.staging=0 failed: cache.staging=0: policy 'lru' copies" in done.stderr
    table = pd.read_parquet(tmp_path / "out" / "results.parquet")
    assert list(table["error"].isna()) == [True, False, True]
    assert done.stdout.endswith("out/results.parquet\n")


def test_axes_of_an_experiment_can_be_replaced(oled, tmp_path: Path) -> None:
    words = ("policy=lru,lfu", "cache.slots=0.25", "sweep.workers=1", "out=out")
    done = oled("sweep", "experiment=policies", *words, torch=False)
    assert done.returncode == 0, done.stderr
    table = pd.read_parquet(tmp_path / "out" / "results.parquet")
    assert list(table["policy"]) == ["lru", "lfu"]
    assert set(table["slots"]) == {"0.25"}


def test_the_shipped_experiments_are_readable() -> None:
    axes = experiment("minutes")
    assert [len(axes[key]) for key in ("policy", "cache.slots", "hardware.h2d_pinned")] == [
        6,
        10,
        8,
    ]
    assert axes["trace.requests"] == [50]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep"], "experiment=NAME must be given"),
        (["sweep", "experiment=polices"], "did you mean 'policies'"),
        (["sweep", "experiment=policies", "resume=yes"], "it is true or false"),
        (["sweep", "experiment=policies", "policy"], "'policy' is not key=value"),
        (["reproduce", "fig99"], "there is no study 'fig99'"),
        (["reproduce"], "name one study, or all"),
    ],
)
def test_wrong_usage_is_one_line(oled, words: list[str], message: str) -> None:
    done = oled(*words, torch=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    slots = ",".join(map(str, range(8, 100)))
    words = ["sweep", "experiment=policies", f"cache.slots={slots}", "sweep.workers=1"]
    command = [sys.executable, "-m", "oled.cli.main", *words, f"out={tmp_path}"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    rows = tmp_path / "rows.jsonl"
    patience = time.monotonic() + 120
    while not (rows.is_file() and rows.stat().st_size) and time.monotonic() < patience:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors.decode()
    kept = pd.read_parquet(tmp_path / "results.parquet")
    assert 0 < len(kept) < 7 * 92
    assert kept["error"].isna().all()
