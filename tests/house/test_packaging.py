"""The wheel carries what a run needs and nothing else; two checkouts never mix their files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("oled", "conf", "experiments", "hydra_plugins", "plots", "traces")
PARTS = (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE")


def _unneeded(folder: str, names: list[str]) -> list[str]:
    """Leave out compiled files and the committed results of the studies."""
    results = ["results"] if Path(folder).name == "experiments" else []
    return [name for name in names if name in ("__pycache__", *results)]


def _copy_checkout(target: Path) -> Path:
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, target / part, ignore=_unneeded)
        else:
            shutil.copy(ROOT / part, target / part)
    return target


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the checkout."""
    source = _copy_checkout(tmp_path_factory.mktemp("source"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--wheel-dir", out, source], check=True)
    [file] = out.glob("oled-*.whl")
    return file


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """List the files of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment of its own that borrows all other libraries.

    The libraries come by a .pth file, after the environment's own folder on the path; an editable
    installation of this checkout among them is left out, since .pth files of .pth files do not run.
    """
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", place, "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-compile", wheel], check=True, env=_clean())
    [packages] = place.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith("-packages")]
    (packages / "borrowed.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    return place


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(command: list[str | Path], cwd: Path, **more: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=_clean() | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("folder", "inside", "pattern"),
    [
        ("oled", "oled", "**/*.py"),
        ("oled", "oled", "py.typed"),
        ("hydra_plugins", "hydra_plugins", "**/*.py"),
        ("oled/models/tiny", "oled/models/tiny", "*"),
        ("conf", "oled/bundled/conf", "**/*.yaml"),
        ("experiments/studies", "oled/bundled/studies", "*.py"),
        ("plots", "oled/bundled/plots", "*.py"),
        ("plots", "oled/bundled/plots", "*.mplstyle"),
        ("traces", "oled/bundled/traces", "**/*"),
    ],
)
def test_the_wheel_has(names: set[str], folder: str, inside: str, pattern: str) -> None:
    files = [file for file in (ROOT / folder).glob(pattern) if file.is_file()]
    wanted = {f"{inside}/{file.relative_to(ROOT / folder)}" for file in files}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert wanted, f"{folder}/{pattern} matches nothing"
    assert wanted <= names, f"missing: {sorted(wanted - names)}"


def test_the_wheel_has_nothing_else(names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"oled", "hydra_plugins"}
    assert not [name for name in names if "tests" in name or name.endswith(".pyc")]
    bundled = {name.split("/")[2] for name in names if name.startswith("oled/bundled/")}
    assert bundled == {"__init__.py", "conf", "plots", "studies", "traces"}


def test_training_stays_out_of_the_wheel(names: set[str]) -> None:
    training = {file.name for file in (ROOT / "experiments" / "training").glob("*.py")}
    assert training
    assert not [name for name in names if name.rpartition("/")[2] in training]


def test_an_installed_wheel_runs_without_a_checkout(home: Path, tmp_path: Path) -> None:
    oled = home / "bin" / "oled"
    listed = _run([oled, "list", "policies"], tmp_path)
    assert {"lru", "oled", "oracle"} <= {line.split()[0] for line in listed.splitlines() if line}
    assert str(home) in _run([home / "bin" / "python", "-c", WHERE], tmp_path)
    assert "whole" in _run([oled, "check", "demo"], tmp_path)
    plain = {"NUMBA_DISABLE_JIT": "1"}  # a small trace in plain Python, instead of compiling
    _run([home / "bin" / "python", "-c", SMALL], tmp_path, **plain)
    words = ["trace=small", "policy=lru", "cache.slots=4", "out=run"]
    assert "hit rate" in _run([oled, "simulate", *words], tmp_path, **plain)
    assert (tmp_path / "run" / "metrics.json").is_file()


SMALL = """
from oled.trace import Geometry
from oled.trace.synthetic import Process, Workload, write_synthetic
shape = Geometry((1, 2), (8, 8), 2, (1 << 20,) * 2, 3)
write_synthetic("small", shape, Workload(1, 1, 2, 4), Process(groups=1, kept_groups=1))
"""
WHERE = "import oled.bundled.studies.common as c, oled.paths as p; print(c.__file__, p.conf_dir())"


def _add_files(checkout: Path, name: str) -> Path:
    """Give a checkout a policy, a figure and a study that no other has."""
    policy = (ROOT / "conf" / "policy" / "lru.yaml").read_text(encoding="utf-8")
    for file, text in (
        (f"conf/policy/{name}.yaml", policy.replace("name: lru", f"name: {name}")),
        (f"plots/{name}.py", f'"""Draw {name}."""\n'),
        (f"experiments/studies/{name}.py", "HERE = __file__\n"),
    ):
        (checkout / file).write_text(text, encoding="utf-8")
    return checkout


def _listed(python: Path, what: str, cwd: Path, **more: str) -> str:
    code = f"import sys; from oled.cli.main import main; sys.exit(main(['list', '{what}']))"
    return _run([python, "-c", code], cwd, **more)


@pytest.fixture(params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Path:
    """Return the Python of an environment where checkout A is installed."""
    if request.param == "wheel":
        return home / "bin" / "python"
    place = tmp_path / "environment"
    shutil.copytree(home, place, symlinks=True)
    checkout = _add_files(_copy_checkout(tmp_path / "a"), "only_in_a")
    command = [sys.executable, "-m", "pip", "--python", place, "install", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--editable", checkout]
    subprocess.run([*command, *options], check=True, env=_clean())
    python = place / "bin" / "python"
    assert "only_in_a" in _listed(python, "policies", tmp_path)
    return python


def test_another_checkout_uses_its_own_files(installed: Path, tmp_path: Path) -> None:
    """Run checkout B where A is installed: B brings its own conf, plots and studies."""
    other = _add_files(_copy_checkout(tmp_path / "b"), "only_in_b")
    for what in ("policies", "plots"):
        found = _listed(installed, what, tmp_path, PYTHONPATH=str(other))
        assert "only_in_b" in found
        assert "only_in_a" not in found
    study = "import oled.bundled.studies.only_in_b as b; print(b.HERE)"
    assert _run([installed, "-c", study], tmp_path, PYTHONPATH=str(other)).startswith(str(other))
