"""Where the bundled files are: the same in a checkout and in an installed wheel (see setup.py)."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from oled.errors import UserError, nearest


@cache
def _folder(package: str) -> Path:
    try:
        return Path(str(resources.files(package)))
    except ModuleNotFoundError as error:
        raise UserError(
            f"{package} is not installed: run 'pip install --editable .' in the checkout"
        ) from error


def conf_dir() -> Path:
    """The Hydra configuration."""
    return _folder("oled._conf")


def plots_dir() -> Path:
    """One Python file per figure."""
    return _folder("oled._plots")


def studies() -> list[str]:
    """Names of the studies: a file in experiments/ with a figure of the same name in plots/."""
    figures = {file.stem for file in plots_dir().glob("*.py")}
    files = _folder("oled._experiments").glob("*.py")
    return sorted(file.stem for file in files if file.stem in figures and file.stem != "__init__")


def traces_dir() -> Path:
    """The bundled traces, a folder each."""
    return _folder("oled._traces")


def model_path() -> Path:
    """The bundled checkpoint."""
    return _folder("oled.models") / "tiny"


def bundled_traces() -> list[str]:
    return sorted(manifest.parent.name for manifest in traces_dir().glob("*/trace.json"))


def trace_path(name_or_path: str | Path) -> Path:
    """The folder of a bundled trace, or the folder given."""
    bundled = bundled_traces()
    if str(name_or_path) in bundled:
        return traces_dir() / str(name_or_path)
    path = Path(name_or_path)
    if path.exists():
        return path
    if len(path.parts) == 1:
        raise UserError(
            f"no trace '{path}', bundled or in this folder: {nearest(str(path), bundled)}"
        )
    raise UserError(f"no trace at {path}: there is no such folder")
