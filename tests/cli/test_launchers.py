"""Hydra's launchers under `oled simulate -m`: a record of every job, folders not shared."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from oled.cli import schema
from oled.paths import conf_dir
from oled.results import table as results

JOBS = ("policy=lru,lfu", "cache.slots=8,16", "out=sweep")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_every_job_is_a_row(oled, tmp_path: Path, launcher: str) -> None:
    name = launcher.partition("_")[0]
    pytest.importorskip(
        f"hydra_plugins.hydra_{name}_launcher", reason=f"the extra oled[{name}] is not installed"
    )
    options = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    done = oled("simulate", "-m", f"hydra/launcher={launcher}", *options, *JOBS, torch=False)
    assert done.returncode == 0, done.stderr
    table = pd.read_parquet(tmp_path / "sweep" / results.TABLE)
    assert list(zip(table["policy"], table["slots"], strict=True)) == [
        ("lru", "8"),
        ("lru", "16"),
        ("lfu", "8"),
        ("lfu", "16"),
    ]
    assert table["error"].isna().all()
    for job in range(4):
        assert (tmp_path / "sweep" / str(job) / ".hydra" / "overrides.yaml").is_file()
    ours = oled("simulate", "-m", *JOBS[:2], "out=ours", "sweep.workers=1", torch=False)
    assert ours.returncode == 0, ours.stderr
    same = pd.read_parquet(tmp_path / "ours" / results.TABLE).drop(columns="wall_s")
    pd.testing.assert_frame_equal(table.drop(columns="wall_s"), same)


def test_a_cluster_s_launcher_composes() -> None:
    pytest.importorskip(
        "hydra_plugins.hydra_submitit_launcher", reason="the extra oled[submitit] is not installed"
    )
    schema.register()
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "policy=oled"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("simulate", overrides=words, return_hydra_config=True)
    assert config.hydra.launcher._target_.endswith("SlurmLauncher")
    assert config.hydra.launcher.partition == "gpu"
    assert config.policy.name == "oled"
