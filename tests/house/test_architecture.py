"""docs/architecture.md is true: its paths exist, its layers hold, its examples work as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from oled.trace import Geometry, load
from oled.trace.check import check
from oled.trace.manifest import read_manifest
from oled.trace.reader import trace_hash
from oled.trace.synthetic import Process, Workload, write_synthetic
from tests.house.test_imports import ROOMS
from tests.provides import row

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))
EXAMPLES = {name: text for name, text in SECTIONS.items() if "```diff" in text}
MOST_FILES = 3


def test_the_layers_are_those_that_the_imports_keep() -> None:
    assert tuple(re.findall(r"^\| `oled/(\w+)` \|", PAGE, re.MULTILINE)) == ROOMS


def test_every_path_exists() -> None:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    paths = re.findall(r"`((?:oled|conf|plots|tests|traces|experiments|docs)/[\w./]*)`", prose)
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []
    links = re.findall(r"\]\(([^)#]+?)\)", prose)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_it_is_linked(page: str) -> None:
    assert "(docs/architecture.md)" in (ROOT / page).read_text(encoding="utf-8")


def test_there_is_an_example_of_each_kind() -> None:
    assert set(EXAMPLES) == {"A retention", "A metric", "An importer", "A figure", "A verb"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy what the examples change; the bundled model and traces are only linked."""
    place = tmp_path / "checkout"
    bulky = ROOT / "oled" / "models" / "tiny"
    for name in ("oled", "conf", "plots", "docs", "experiments/studies"):
        shutil.copytree(
            ROOT / name,
            place / name,
            ignore=lambda folder, names: [
                one for one in names if one == "__pycache__" or Path(folder) / one == bulky
            ],
        )
    (place / "oled" / "models" / "tiny").symlink_to(bulky)
    (place / "traces").symlink_to(ROOT / "traces")
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a trace so small that a replay in plain Python takes a second."""
    place = tmp_path_factory.mktemp("small") / "trace"
    shape = Geometry((1, 2), (8, 8), 2, (1 << 20,) * 2, 3)
    workload = Workload(requests=1, prompt_blocks=1, blocks=2, block_length=4)
    write_synthetic(place, shape, workload, Process(groups=1, kept_groups=1))
    return place


def _apply(section: str, checkout: Path) -> list[str]:
    """Apply a section's diff as the page says, and return the files it touches."""
    [diff] = re.findall(r"```diff\n(.*?)```", EXAMPLES[section], re.DOTALL)
    command = ["git", "apply", "-C1", "-"]
    subprocess.run(command, cwd=checkout, input=diff, text=True, check=True, env=_alone(checkout))
    return re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)


def _alone(checkout: Path) -> dict[str, str]:
    """Return an environment where git sees no repository and Python sees this checkout alone."""
    ceiling = {"GIT_CEILING_DIRECTORIES": str(checkout.parent), "NUMBA_DISABLE_JIT": "1"}
    return {**os.environ, **ceiling, "PYTHONPATH": str(checkout)}


def _run(section: str, checkout: Path, **replaced: str) -> str:
    """Run the command that a section prints, with some of its words replaced, and return stdout."""
    [line] = re.findall(r"^ {4}oled (.*)$", EXAMPLES[section], re.MULTILINE)
    words = [replaced.pop(word.partition("=")[0], word) for word in shlex.split(line)]
    command = [sys.executable, "-m", "oled.cli.main", *words, *replaced.values()]
    work = checkout.parent
    done = subprocess.run(command, cwd=work, env=_alone(checkout), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _simulated(section: str, checkout: Path, small: Path) -> Any:
    _run(section, checkout, trace=f"trace={small}", **{"cache.slots": "cache.slots=4"})
    return json.loads((checkout.parent / "run" / "metrics.json").read_text(encoding="utf-8"))


def retention(checkout: Path, small: Path) -> None:
    """Replay under the new policy."""
    metrics = _simulated("A retention", checkout, small)
    assert metrics["provenance"]["policy"] == "most_tokens"
    assert 0 < metrics["hit_rate"] < 1


def metric(checkout: Path, small: Path) -> None:
    """Find the new name beside its parts, in each phase too."""
    metrics = _simulated("A metric", checkout, small)
    assert metrics["cpu_share"] == metrics["cpu_executions"] / metrics["accesses"] > 0
    assert all("cpu_share" in phase for phase in metrics["phases"].values())


def importer(checkout: Path, small: Path) -> None:
    """Import a recording; its trace is whole and holds what docs/traces.md says."""
    lines = [
        f"{token} {layer} {token % 8} {(token + 1) % 8}" for token in (0, 1) for layer in (1, 2)
    ]
    (checkout.parent / "routes.txt").write_text("\n".join(lines), encoding="utf-8")
    _run("An importer", checkout)
    trace = load(checkout.parent / "imported")
    assert check(trace.path).ok
    assert trace.routing.expert_ids.tolist() == [[0, 1], [0, 1], [1, 2], [1, 2]]
    said = (checkout / "docs" / "traces.md").read_text(encoding="utf-8")
    assert f"| `lines` | {' | '.join(row(trace))} |" in said


def figure(checkout: Path, small: Path) -> None:
    """Draw a results table."""
    table = pd.DataFrame({"policy": ["lru", "oled"], "tpot_ns": [2e6, 1e6]})
    table.to_parquet(checkout.parent / "results.parquet")
    files = _run("A figure", checkout).split()
    assert [Path(file).name for file in files] == ["tpot.png", "tpot.pdf"]
    assert all((checkout.parent / file).stat().st_size > 1000 for file in files)


def verb(checkout: Path, small: Path) -> None:
    """Run the new verb on a trace of ours."""
    printed = _run("A verb", checkout, demo=str(small)).strip()
    assert printed == trace_hash(read_manifest(small))


@pytest.mark.parametrize(
    ("section", "prove"),
    [
        ("A retention", retention),
        ("A metric", metric),
        ("An importer", importer),
        ("A figure", figure),
        ("A verb", verb),
    ],
)
def test_the_example_works(
    section: str, prove: Callable[[Path, Path], None], checkout: Path, small: Path
) -> None:
    files = _apply(section, checkout)
    assert 1 <= len(files) <= MOST_FILES
    sources = [file for file in files if file.endswith(".py")]
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", *sources],
        cwd=checkout,
        check=True,
    )
    prove(checkout, small)
