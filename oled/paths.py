"""Find the bundled files: the same way in a checkout and in a wheel (`oled.bundled`)."""

from __future__ import annotations

from pathlib import Path

from oled.bundled import HOME
from oled.errors import UserError, nearest


def conf_dir() -> Path:
    """The Hydra configuration."""
    return HOME / "conf"


def plots_dir() -> Path:
    """One Python file per figure."""
    return HOME / "plots"


def studies() -> list[str]:
    """Name the studies: a file in experiments/studies/ with a figure of its name in plots/."""
    figures = {file.stem for file in plots_dir().glob("*.py")}
    files = (HOME / "experiments" / "studies").glob("*.py")
    return sorted(file.stem for file in files if file.stem in figures and file.stem != "__init__")


def traces_dir() -> Path:
    """The bundled traces, a folder each."""
    return HOME / "traces"


def model_path() -> Path:
    """The bundled checkpoint."""
    return Path(__file__).parent / "models" / "tiny"


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
