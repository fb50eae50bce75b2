"""One field of `Settings` is a key everywhere: a copy of the package gets one and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIELD = '    beats: int = key(3, "how often it beats", name="cache.beats", least=1)\n'
BEFORE = "    timeline: tuple[int, int] | None = None"
SEEN = """\
import contextlib, io, json
from oled import Settings
from oled.cli.main import main
from oled.errors import UserError
from oled.sweeps import Configuration

def printed(*words):
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main(list(words))
    return text.getvalue()

def refused(make):
    try:
        make()
    except UserError as error:
        return str(error)

point = Configuration.of([("cache.beats", 5)])
print(json.dumps({
    "help": printed("simulate", "--help"),
    "schema": printed("simulate", "cache.beats=5", "--cfg", "job"),
    "wrong": main(["simulate", "cache.beats=often"]),
    "python": Settings(beats=4).beats,
    "default": Settings().beats,
    "refused": refused(lambda: Settings(beats=0)),
    "argument": point.settings()["beats"],
    "column": point.columns()["beats"],
}))
"""


def test_a_field_is_a_key_in_help_schema_python_and_columns(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "oled", tmp_path / "oled", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conf", "experiments", "hydra_plugins", "plots", "traces"):
        (tmp_path / name).symlink_to(ROOT / name)
    settings = tmp_path / "oled" / "sim" / "settings.py"
    text = settings.read_text(encoding="utf-8")
    assert text.count(BEFORE) == 1
    settings.write_text(text.replace(BEFORE, FIELD + BEFORE), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SEEN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OLED_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "cache.beats=3" in seen["help"]
    assert "how often it beats" in seen["help"]
    assert "  beats: 5\n" in seen["schema"]
    assert seen["wrong"] == 2
    assert (seen["python"], seen["default"], seen["argument"], seen["column"]) == (4, 3, 5, 5)
    assert seen["refused"] == "cache.beats is 0; it must be at least 1"
