"""Running the command line as a person does, and as one does where torch can not be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

POISON = "raise ImportError('torch was imported')\n"


@pytest.fixture
def oled(tmp_path: Path) -> Run:
    """`oled(*words)` in an empty folder; `torch=False` makes torch impossible to import."""

    def run(*words: str, torch: bool = True) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ)
        if not torch:
            for name in ("torch", "transformers"):
                folder = tmp_path / "poison" / name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "__init__.py").write_text(POISON)
            environment["PYTHONPATH"] = str(tmp_path / "poison")
        return subprocess.run(
            [sys.executable, "-m", "oled.cli.main", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
