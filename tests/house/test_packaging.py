"""The wheel carries what a run needs: sources, conf/, experiments/, plots/, traces/, the model."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("oled", "conf", "experiments", "plots", "traces")
PARTS = (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE")


def _unneeded(folder: str, names: list[str]) -> list[str]:
    """Leave out compiled files and the committed results of the studies."""
    results = ["results"] if Path(folder).name == "experiments" else []
    return [name for name in names if name in ("__pycache__", *results)]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of a wheel built from a copy of the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=_unneeded)
        else:
            shutil.copy(ROOT / part, source / part)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--wheel-dir", out, source], check=True)
    [wheel] = out.glob("oled-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize(
    ("folder", "inside", "pattern"),
    [
        ("oled", "oled", "**/*.py"),
        ("oled", "oled", "py.typed"),
        ("oled/models/tiny", "oled/models/tiny", "*"),
        ("conf", "oled/bundled/conf", "**/*.yaml"),
        ("experiments/studies", "oled/bundled/experiments/studies", "*.py"),
        ("plots", "oled/bundled/plots", "*.py"),
        ("plots", "oled/bundled/plots", "*.mplstyle"),
        ("traces", "oled/bundled/traces", "**/*"),
    ],
)
def test_the_wheel_has(names: set[str], folder: str, inside: str, pattern: str):
    files = [file for file in (ROOT / folder).glob(pattern) if file.is_file()]
    wanted = {f"{inside}/{file.relative_to(ROOT / folder)}" for file in files}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert wanted, f"{folder}/{pattern} matches nothing"
    assert wanted <= names, f"missing: {sorted(wanted - names)}"


def test_the_wheel_has_nothing_else(names: set[str]):
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"oled"}
    assert not [name for name in names if "tests" in name or name.endswith(".pyc")]
