"""Find the bundled files: the same way in a checkout and in a wheel (`oled.bundled`)."""

from __future__ import annotations

from pathlib import Path

from oled.bundled import HOME, STUDIES
from oled.errors import UserError, nearest


def conf_dir() -> Path:
    """Return the folder of the Hydra configuration."""
    return HOME / "conf"


def plots_dir() -> Path:
    """Return the folder that holds one Python file per figure."""
    return HOME / "plots"


def studies() -> list[str]:
    """Name the studies: a file in experiments/studies/ with a figure of its name in plots/."""
    figures = {file.stem for file in plots_dir().glob("*.py")}
    return sorted(file.stem for file in STUDIES.glob("[!_]*.py") if file.stem in figures)


def traces_dir() -> Path:
    """Return the folder of the bundled traces, a folder each."""
    return HOME / "traces"


def model_path() -> Path:
    """Return the folder of the bundled checkpoint."""
    return Path(__file__).parent / "models" / "tiny"


def bundled_traces() -> list[str]:
    """Name the bundled traces."""
    return sorted(manifest.parent.name for manifest in traces_dir().glob("*/trace.json"))


def trace_path(name_or_path: str | Path) -> Path:
    """Return the folder of a bundled trace, or the folder given."""
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
