"""What the README tells people to type works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from oled.cli import field, inspection, runs, sizing, traces

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```\w+\n# (\S+/\S+)\n(.*?)```", README, re.DOTALL))
COMMANDS = [line.partition("#")[0].strip() for line in re.findall(r"^ {4}(oled .*)$", README, re.M)]


def test_the_policy_of_ones_own(oled, tmp_path):
    assert sorted(FILES) == ["my_policies/busy.py", "my_policies/busy.yaml"]
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    [command] = [line for line in COMMANDS if "busy.yaml" in line]
    done = oled(*shlex.split(command)[1:], "out=sweep", torch=False)
    assert done.returncode == 0, done.stderr
    table = pd.read_parquet(tmp_path / "sweep" / "results.parquet")
    assert table["policy"].tolist() == ["lru", "busy"]
    assert (table["hit_rate"] > 0).all()


@pytest.mark.parametrize("command", [line for line in COMMANDS if "busy.yaml" not in line])
def test_commands_are_spelt_right(oled, command, tmp_path):
    _, verb, *words = shlex.split(command)
    (tmp_path / "trace").mkdir()
    if verb in runs.VERBS:
        words = [word for word in words if word != "-m"]
        words = [word.partition(",")[0] for word in words]
        done = oled(verb, *words, "--cfg", "job", torch=False)
        assert done.returncode == 0, done.stderr
    else:
        assert verb in {**sizing.VERBS, **inspection.VERBS, **traces.VERBS, **field.VERBS}


def test_the_figures_are_there():
    for name in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (Path(__file__).parents[2] / name).is_file(), name
