"""`oled sweep`, `reproduce` and `report` as people type them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from oled.cli import schema
from oled.cli.main import main
from oled.paths import conf_dir, traces_dir
from oled.sweeps import simulation

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
    assert done.stderr.endswith("oled: 1 of 3 runs failed\n")
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


def test_the_shipped_experiments_compose() -> None:
    schema.register()
    words = ["experiment=minutes"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("simulate", words, return_hydra_config=True)
    params = [f"{key}={value}" for key, value in config.hydra.sweeper.params.items()]
    [jobs] = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(params), None)
    assert len(jobs) == 6 * 10 * 8
    assert jobs[-1][-1] == "hardware.h2d_pinned='128 GB/s'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep"], "experiment=NAME or an axis must be given"),
        (["sweep", "experiment=polices"], "did you mean 'policies'"),
        (
            ["sweep", "experiment=policies", "resume=maybe"],
            "oled: resume: Value 'maybe' is not a valid bool",
        ),
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


def test_words_may_stand_on_both_sides_of_an_option(oled) -> None:
    done = oled("reproduce", "fig03", "--redraw", "out=nowhere", torch=False)
    assert done.returncode == 1
    assert "nowhere/fig03: there is no results table" in done.stderr


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


def test_recordings_are_swept_and_end_with_a_table(oled, tmp_path: Path) -> None:
    prompts = traces_dir() / "prompts.jsonl"
    words = ["-m", f"prompts={prompts}", "limit=1", "decode.max_new_tokens=8", "out=sweep"]
    done = oled("record", *words, "decode.threshold=0.5,0.9", "decode.block_length=16,1")
    assert done.returncode == 1, done.stderr
    assert "decode.threshold=0.5 decode.block_length=1 failed: decode.block_length is 1" in (
        done.stderr
    )
    table = pd.read_parquet(tmp_path / "sweep" / "results.parquet")
    assert list(table)[:2] == ["decode.threshold", "decode.block_length"]
    assert table["error"].isna().tolist() == [True, False, True, False]
    assert (table["forwards"].dropna() > 0).all()
    for number in (0, 2):
        assert (tmp_path / "sweep" / str(number) / "trace.json").is_file()


def test_ctrl_c_under_m_keeps_what_is_done(tmp_path: Path, monkeypatch) -> None:
    real = simulation.simulate_configuration

    def simulate(point):
        if point.value("cache.slots") == 16:
            raise KeyboardInterrupt
        return real(point)

    words = ["-m", "policy=lru", "cache.slots=8,16,24", f"out={tmp_path}", "sweep.workers=1"]
    with monkeypatch.context() as patched:
        patched.setattr(simulation, "simulate_configuration", simulate)
        assert main(["simulate", *words]) == 130
    assert pd.read_parquet(tmp_path / "results.parquet")["slots"].tolist() == ["8"]
    assert main(["simulate", *words, "resume=true"]) == 0
    table = pd.read_parquet(tmp_path / "results.parquet")
    assert table["slots"].tolist() == ["8", "16", "24"]
