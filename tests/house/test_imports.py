"""Who may import whom (DESIGN §1), held by reading the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "oled"

ROOMS = (
    "models",
    "trace",
    "altered",
    "hardware",
    "policies",
    "sim",
    "results",
    "parallel",
    "sweeps",
    "field",
    "running",
    "live",
    "quality",
    "record",
    "profiling",
    "validate",
    "advise",
    "studies",
    "cli",
)
"""The rooms of oled from the ground up: a room imports only rooms named before it."""

SHARED = ("atomic", "bundled", "errors", "paths", "types", "_jit", "keys")
"""What every room may import: `oled.NAME`."""

WITHOUT_TORCH = (
    "trace",
    "altered",
    "hardware",
    "policies",
    "sim",
    "results",
    "parallel",
    "sweeps",
    "field",
    "advise",
)
"""Rooms that import neither torch nor transformers."""

HEAVY = ("torch", "transformers")

READS_TORCH_FILES = "trace/importers/tensors.py"
"""Imports torch, inside the functions that read files of torch.save; `trace` needs none."""


def imports_of(file: Path) -> set[str]:
    """Every module named in an import statement, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(file, node)
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def _absolute(file: Path, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return str(node.module)
    home = file.relative_to(PACKAGE.parent).parts[: -node.level]
    return ".".join([*home, *([node.module] if node.module else [])])


def breaches(file: Path, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for name in sorted(imports_of(file))
        for rule in forbidden
        if name == rule or name.startswith(f"{rule}.")
    ]


def test_every_room_has_its_place() -> None:
    rooms = {file.parent.name for file in PACKAGE.glob("*/*.py")}
    assert rooms - set(SHARED) == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_rooms_below_them(room: str) -> None:
    above = ROOMS[ROOMS.index(room) + 1 :]
    forbidden = tuple(f"oled.{name}" for name in above)
    if room in WITHOUT_TORCH:
        forbidden += HEAVY
    found = [line for file in (PACKAGE / room).rglob("*.py") for line in breaches(file, forbidden)]
    allowed = f"{READS_TORCH_FILES} imports torch"
    assert [line for line in found if line != allowed] == []


def test_torch_is_imported_when_such_a_file_is_read_and_not_before() -> None:
    tree = ast.parse((PACKAGE / READS_TORCH_FILES).read_text(encoding="utf-8"))
    assert not [n for n in tree.body if isinstance(n, ast.Import) and n.names[0].name == "torch"]


def test_nothing_imports_the_command_line() -> None:
    outside = [file for file in PACKAGE.rglob("*.py") if "cli" not in file.parts]
    assert not [line for file in outside for line in breaches(file, ("oled.cli",))]


def test_plots_read_results_only() -> None:
    for file in (PACKAGE.parent / "plots").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        absolute = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 0]
        assert not [n.module for n in absolute if str(n.module).startswith("oled")], file
