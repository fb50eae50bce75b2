"""The text that the small model is trained on, by source, and the licence of each.

All of it is at hand where the project is installed; nothing is downloaded and nothing is kept in
the repository. HumanEval and GSM8K's test split are never trained on.
"""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tiny_data

DOCUMENTED = ("numpy", "pandas", "networkx", "sympy", "dask", "matplotlib")
SHORTEST = 400  # characters of a docstring
LEFT_OUT = {
    "test",
    "tests",
    "testing",
    "idlelib",
    "encodings",
    "lib2to3",
    "site-packages",
    "turtledemo",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where documents come from; `read` takes the folder of GSM8K."""

    licence: str
    what: str
    read: Callable[[Path], list[str]]


def modules(folder: Path) -> Iterator[Path]:
    """Python files below a folder, in a fixed order, without tests."""
    for path in sorted(folder.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(folder).parts) and "_data" not in path.stem:
            yield path


def standard_library(_: Path) -> list[str]:
    """Sources of the running interpreter's pure Python modules."""
    found = modules(Path(sysconfig.get_path("stdlib")))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in found]


def language_reference(_: Path) -> list[str]:
    """The parts of Python's language reference that `help()` shows."""
    from pydoc_data.topics import topics

    return list(topics.values())


def docstrings(_: Path) -> list[str]:
    """Long docstrings of the packages in `DOCUMENTED`, each text once."""
    found: dict[str, None] = {}
    for package in DOCUMENTED:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"{package} is not installed; its docstrings are training text")
        for path in modules(Path(spec.origin).parent):
            tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    text = ast.get_docstring(node)
                    if text is not None and len(text) >= SHORTEST:
                        found[text] = None
    return list(found)


def licences(_: Path) -> list[str]:
    """Licence texts of the installed packages, each text once."""
    site = Path(sysconfig.get_path("purelib"))
    files = sorted(site.glob("*.dist-info/licenses/**/*"))
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in files if path.is_file())
    return list(dict.fromkeys(texts))


SOURCES = {
    "gsm8k": Source(
        "MIT", "GSM8K, train split", lambda d: tiny_data.load_documents(d / "train.jsonl")
    ),
    "python": Source("PSF-2.0", "Python's standard library, sources", standard_library),
    "reference": Source("PSF-2.0", "Python's language reference", language_reference),
    "docs": Source(
        "BSD-3-Clause, matplotlib's own", ", ".join(DOCUMENTED) + ": docstrings", docstrings
    ),
    "licences": Source("their own (verbatim copies)", "licence texts of packages", licences),
}
