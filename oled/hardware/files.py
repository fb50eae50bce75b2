"""Reading a named YAML of a configuration group, with messages that say file, field and value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from oled.errors import UserError, nearest
from oled.hardware.quantity import UNITS, Dimension, Quantity
from oled.paths import conf_dir


def shipped(group: str) -> list[str]:
    """Names of the files of `conf/GROUP`."""
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


def read_named(group: str, source: str | Path) -> tuple[Mapping[str, Any], str]:
    """The mapping in `conf/GROUP/SOURCE.yaml` or in the file SOURCE, and the name of the file."""
    text = str(source)
    is_path = isinstance(source, Path) or "/" in text or text.endswith((".yaml", ".yml"))
    file = Path(source) if is_path else conf_dir() / group / f"{text}.yaml"
    if not file.is_file():
        if is_path:
            raise UserError(f"{file}: no such {group} file")
        raise UserError(f"{group} '{text}' is not known; {nearest(text, shipped(group))}")
    where = str(file) if is_path else f"{group}/{file.name}"
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: holds {type(data).__name__}; it must be a mapping of fields")
    return data, where


def check_keys(
    data: Mapping[str, Any], known: Iterable[str], *, optional: Collection[str], where: str
) -> None:
    """Refuse unknown and missing keys."""
    names = list(known)
    for key in data:
        if key not in names and key not in optional:
            raise UserError(
                f"{where}: field '{key}' is not known; {nearest(str(key), [*names, *optional])}"
            )
    for name in names:
        if name not in data and name not in optional:
            raise UserError(f"{where}: field '{name}' is missing")


def parse_quantity(data: Any, where: str, dimension: Dimension) -> Quantity:
    """A quantity of one dimension."""
    try:
        quantity = Quantity.parse(data)
    except UserError as error:
        raise UserError(f"{where} {error}") from error
    if quantity.dimension is not dimension:
        units = [unit for unit, (kind, _) in UNITS.items() if kind is dimension]
        raise UserError(
            f"{where} is {quantity.value:g} in unit '{quantity.unit}'; use {' or '.join(units)}"
        )
    return quantity
