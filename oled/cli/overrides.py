"""Overrides as people write them, made into what Hydra understands; and Hydra's complaints, made
into one line that names the nearest right word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from oled.cli.usage import UsageError
from oled.errors import UserError, nearest
from oled.paths import conf_dir

FOLDER_GROUPS = {  # have an option `path`, and what else may be written
    "trace": "or a folder",
    "model": "or a folder or OWNER/NAME of a checkpoint",
}
FILE_GROUPS = ("policy", "hardware", "runtime", "topology")  # an option may be a user's YAML


def rewrite(overrides: Sequence[str]) -> list[str]:
    """`trace=DIR` becomes `trace=path trace.path=DIR`; `policy=FILE.yaml` becomes an option."""
    return [new for old in overrides for new in _rewrite_one(old)]


def _rewrite_one(override: str) -> Iterator[str]:
    group, _, text = override.partition("=")
    values = text.split(",")
    if text == "null" and group in (*FOLDER_GROUPS, *FILE_GROUPS):
        raise UsageError(f"{override}: leave it out")
    if group == "hydra.searchpath":
        for folder in re.findall(r"file://([^,\]\s'\"]+)", text):
            _make_importable(Path(folder) / "policy")
    if group in FOLDER_GROUPS and any(_is_folder(group, value) for value in values):
        yield f"{group}=path"
        yield f"{group}.path={','.join(map(_quoted, values))}"
    elif group in FILE_GROUPS and any(value.endswith((".yaml", ".yml")) for value in values):
        yield f"{group}={','.join(_as_option(group, value) for value in values)}"
    else:
        yield override


def _is_folder(group: str, value: str) -> bool:
    if (conf_dir() / group / f"{value}.yaml").is_file():
        return False
    return "/" in value or Path(value).exists()


def _quoted(value: str) -> str:
    plain = re.fullmatch(r"[\w./~@%+-]+", value)
    return value if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _as_option(group: str, value: str) -> str:
    """Registers the user's YAML file as an option of its group and returns the option's name."""
    file = Path(value)
    if file.suffix not in (".yaml", ".yml"):
        return value
    if not file.is_file():
        raise UserError(f"{group}={value}: there is no such file")
    node = OmegaConf.load(file)
    if not isinstance(node, DictConfig):
        raise UserError(f"{file}: holds a {type(node).__name__}; it must be a mapping of fields")
    _make_importable(file.parent)
    ConfigStore.instance().store(group=group, name=file.stem, node=node)
    return file.stem


def _make_importable(folder: Path) -> None:
    """Parts of a policy may lie beside its composition."""
    from oled.policies.files import make_importable

    make_importable(folder)


def complaint(error: Exception, config_name: str) -> UsageError | None:
    """One line for what Hydra refused; None where the error is not about the command line."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = [name for name in error.options if not name.endswith("_schema")]
        also = ""
        if group in FOLDER_GROUPS:
            options.remove("path")
            also = f", {FOLDER_GROUPS[group]}"
        return UsageError(f"there is no {group} '{option}'; {nearest(option, options)}{also}")
    if isinstance(error, OverrideParseException):
        return UsageError(f"'{error.override}' is not key=value: {_first_line(error)}")
    if isinstance(error, MissingMandatoryValue):
        return UsageError(f"{_full_key(error)} must be given")
    if isinstance(error, ConfigCompositionException | HydraException | OmegaConfBaseException):
        unknown = re.match(r"Could not override '([^']+)'", str(error))
        if unknown:
            key = unknown[1]
            return UsageError(f"there is no key '{key}'; {nearest(key, _known_keys(config_name))}")
        reason = error.__cause__ or error
        key = _full_key(reason)
        return UsageError(f"{key}: {_first_line(reason)}" if key else _first_line(error))
    return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _full_key(error: BaseException) -> str:
    found = re.search(r"full_key: (\S+)", str(error))
    return found[1] if found else ""


def _known_keys(config_name: str) -> list[str]:
    """Every key of the default configuration, groups included."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(config_name)
    return list(_walk(OmegaConf.to_container(config), ""))


def _walk(node: object, prefix: str) -> Iterator[str]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        yield f"{prefix}{key}"
        yield from _walk(value, f"{prefix}{key}.")
