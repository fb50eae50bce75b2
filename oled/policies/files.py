"""Policies as files: one YAML each in `conf/policy`, or a user's own with parts beside it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from oled.errors import UserError, nearest
from oled.paths import conf_dir

PLACEMENT = "placement"
"""The key of a policy for several GPUs, which `oled.parallel` reads; the others are
compositions."""


def policy_names() -> list[str]:
    """Every shipped policy."""
    return sorted(file.stem for file in (conf_dir() / "policy").glob("*.yaml"))


@functools.cache
def composition_names() -> tuple[str, ...]:
    """The shipped policies of one GPU."""
    return tuple(name for name in policy_names() if PLACEMENT not in read_policy(name)[0])


@functools.cache
def placement_names() -> tuple[str, ...]:
    """The shipped policies of several GPUs."""
    return tuple(name for name in policy_names() if PLACEMENT in read_policy(name)[0])


def read_policy(policy: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """A policy's mapping, by its name, the path of a YAML file or itself, and what to call it."""
    if isinstance(policy, Mapping):
        return policy, "policy"
    file = Path(policy)
    if file.suffix in (".yaml", ".yml"):
        make_importable(file.parent)
    else:
        file = conf_dir() / "policy" / f"{policy}.yaml"
        if not file.is_file():
            raise UserError(f"no policy '{policy}': {nearest(str(policy), policy_names())}")
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read as YAML ({error})") from error
    if not isinstance(data, Mapping):
        raise UserError(f"{file}: a policy is a mapping")
    return data, file.name


def make_importable(folder: Path) -> None:
    """Let a user's policy name parts in Python files that lie beside it."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.append(place)


def make_part(data: Any, base: type[Any], where: str) -> Any:
    """The instance of a `base` that a mapping with `_target_` and options describes."""
    if not isinstance(data, Mapping) or "_target_" not in data:
        raise UserError(f"{where}: a part is a mapping with a _target_ (module.Class)")
    module_name, _, class_name = str(data["_target_"]).rpartition(".")
    try:
        part_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{where}: cannot import {data['_target_']} ({error})") from error
    if not (isinstance(part_class, type) and issubclass(part_class, base)):
        raise UserError(f"{where}: {data['_target_']} is no {base.__name__}")
    options = {key: value for key, value in data.items() if key != "_target_"}
    known = {field.name for field in dataclasses.fields(part_class)}
    for key in options:
        if key not in known:
            raise UserError(f"{where}: {class_name} has no '{key}': {nearest(key, known)}")
    try:
        return part_class(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
