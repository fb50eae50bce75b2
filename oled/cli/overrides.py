"""Translate overrides as people write them for Hydra, and Hydra's complaints for people.

A complaint becomes one line that names the nearest right word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString, ValueType
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from oled.cli.keys import KEYS
from oled.cli.usage import UsageError
from oled.errors import UserError, nearest
from oled.hardware.files import read_named
from oled.hardware.profile import split_bound
from oled.paths import conf_dir

FOLDER_GROUPS = {  # have an option `path`, and what else may be written
    "trace": "or a folder",
    "model": "or a folder or OWNER/NAME of a checkpoint",
}
FILE_GROUPS = ("policy", "hardware", "runtime", "topology", "experiment")
"""Groups of which an option may be a user's YAML file."""
SWEEP = {one.name: f"hydra.launcher.{one.field}" for one in KEYS["sweep"]}
"""Keys of a sweep, and what our launcher calls them."""


def rewrite(verb: str, words: Sequence[str]) -> list[str]:
    """Return the words for Hydra: folders, files and ends of profiles become options of groups.

    `trace=DIR` becomes `trace=path trace.path=DIR`; `policy=FILE.yaml` stays, and is registered.
    """
    other_launcher = any(word.startswith("hydra/launcher=") for word in words)
    groups = [one.name for one in KEYS[verb] if one.is_group]
    return [
        new for word in words for new in _rewrite_one(word, [*groups, "experiment"], other_launcher)
    ]


def _rewrite_one(word: str, groups: list[str], other_launcher: bool) -> Iterator[str]:
    name, equals, text = word.partition("=")
    if name in SWEEP and equals:
        if other_launcher:
            raise UsageError(f"{word}: is for our own launcher: leave out hydra/launcher=")
        yield f"{SWEEP[name]}={text}"
    elif name == "hydra.searchpath":
        for folder in re.findall(r"file://([^,\]\s'\"]+)", text):
            _make_importable(Path(folder) / "policy")
        yield word
    elif name in groups and equals:
        yield from _options(name, word)
    else:
        yield word


def _options(group: str, word: str) -> Iterator[str]:
    """Yield what chooses the options of a group."""
    values = _values(word)
    if values == [None]:
        raise UsageError(f"{word}: leave it out")
    names = [str(value) for value in values]
    if group in FOLDER_GROUPS and any(_is_folder(group, name) for name in names):
        yield f"{group}=path"
        yield f"{group}.path={','.join(map(_quoted, names))}"
    elif values and group in FILE_GROUPS:
        yield f"{group}={','.join(_quoted(_as_option(group, name)) for name in names)}"
    elif any(not isinstance(value, str) for value in values):
        yield f"{group}={','.join(map(_quoted, names))}"
    else:
        yield word


def _values(word: str) -> list[Any]:
    """Return the values of an override, several of a sweep; none of what only Hydra can list."""
    try:
        override = OverridesParser.create().parse_override(word)
    except OverrideParseException:  # Hydra meets it again, and it is explained there
        return []
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP or not override.is_discrete_sweep():
        return []
    return [_plain(value) for value in override.sweep_iterator()]


def _plain(value: Any) -> Any:
    return value.text if isinstance(value, QuotedString) else value


def _is_folder(group: str, value: str) -> bool:
    if (conf_dir() / group / f"{value}.yaml").is_file():
        return False
    return "/" in value or Path(value).exists()


def _quoted(value: str) -> str:
    plain = re.fullmatch(r"[\w./~@%+-]+", value) and not re.fullmatch(r"[\d.e+-]+", value)
    return value if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _as_option(group: str, value: str) -> str:
    """Register a user's file, or the end of a profile, as an option; return the option's name."""
    if group == "hardware" and "@" in value:
        name, bound = split_bound(value)
        node = {**read_named(group, name)[0], "at": bound}
        ConfigStore.instance().store(group=group, name=value, node=node)
        return value
    file = Path(value)
    if file.suffix not in (".yaml", ".yml"):
        return value
    if not file.is_file():
        raise UserError(f"{group}={value}: there is no such file")
    try:
        read = OmegaConf.load(file)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(read, DictConfig):
        raise UserError(f"{file}: holds a {type(read).__name__}; it must be a mapping of fields")
    _make_importable(file.parent)
    option = relpath(file) if file.is_absolute() else str(file)  # no option begins with a slash
    place, _, name = f"{group}/{option}".rpartition("/")
    package = "_global_" if group == "experiment" else group
    ConfigStore.instance().store(group=place, name=name, node=read, package=package)
    return option


def _make_importable(folder: Path) -> None:
    """Let parts of a policy lie beside its composition."""
    from oled.policies.files import make_importable

    make_importable(folder)


def complaint(error: Exception, config_name: str) -> UsageError | None:
    """Return a line for what Hydra refused; None where the error is not about the command line."""
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
        several = re.search(r"(?:argument|Sweep parameters) '([^']+)'", str(error))
        if several:
            return UsageError(
                f"{several[1]}: these are several values: add -m to sweep over them"
                ", or write [a,b] for a list"
            )
        unknown = re.match(r"Could not override '([^']+)'", str(error))
        if unknown:
            key = unknown[1]
            return UsageError(f"there is no key '{key}'; {nearest(key, _known_keys(config_name))}")
        reason = error.__cause__ or error
        key = {long: short for short, long in SWEEP.items()}.get(_full_key(reason))
        key = key or _full_key(reason)
        return UsageError(f"{key}: {_first_line(reason)}" if key else _first_line(error))
    return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _full_key(error: BaseException) -> str:
    found = re.search(r"full_key: (\S+)", str(error))
    return found[1] if found else ""


def _known_keys(config_name: str) -> list[str]:
    """Return every key of the default configuration, groups included."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(config_name)
    return list(_walk(OmegaConf.to_container(config), ""))


def _walk(node: object, prefix: str) -> Iterator[str]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        yield f"{prefix}{key}"
        yield from _walk(value, f"{prefix}{key}.")
