"""Declare the keys of a run once: name, type, default, help and column are one field.

The schema that Hydra validates against, the texts of `--help`, the checks of values, the arguments
of the Python interface and the columns of results tables are all made from `keys_of(dataclass)`.
This module imports neither Hydra nor numpy: help must stay light.
"""

from __future__ import annotations

import dataclasses
import numbers
import textwrap
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from oled.errors import UserError

REQUIRED = "???"
"""The default of a key that must be given (the word that OmegaConf uses, too)."""

_HELP, _NAME, _SHOWN, _LEAST, _GROUP = "help", "name", "shown", "least", "group"


def key(
    default: Any,
    help: str,
    *,
    name: str = "",
    shown: str = "",
    least: int | None = None,
    group: bool = False,
) -> Any:
    """Declare a field that is a key.

    `name` is its name on the command line, if that is not the field's; `shown` stands in the help
    in place of its choices or default; `least` is the smallest number allowed; a `group` is chosen
    among the files of `conf/NAME`, and its single values may be set, too.
    """
    told = {_HELP: help, _NAME: name, _SHOWN: shown, _LEAST: least, _GROUP: group}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=told)
    return dataclasses.field(default=default, metadata=told)


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of a run."""

    name: str  # on the command line: cache.slots
    field: str  # of the dataclass; also the argument in Python and the column of a results table
    annotation: Any
    default: Any
    help: str
    shown: str = ""
    least: int | None = None
    is_group: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that a Literal allows, alone or beside other types."""
        return tuple(word for kind in self._kinds if get_origin(kind) is Literal
                     for word in get_args(kind))  # fmt: skip

    @property
    def types(self) -> tuple[type, ...]:
        """The types that a value may have, apart from the words of `choices`."""
        plain = (get_origin(kind) or kind for kind in self._kinds)
        return tuple(kind for kind in plain if kind is not Literal)

    @property
    def _kinds(self) -> tuple[Any, ...]:
        is_union = get_origin(self.annotation) in (Union, types.UnionType)
        return get_args(self.annotation) if is_union else (self.annotation,)

    def check(self, value: Any) -> None:
        """Raise UserError where the value has another type, is no choice or is too small."""
        if value in self.choices if isinstance(value, str) else False:
            return
        if not any(_is(value, kind) for kind in self.types) or (
            self.least is not None and isinstance(value, numbers.Real) and value < self.least
        ):
            raise UserError(f"{self.name} is {value!r}; {self._wanted()}")

    def _wanted(self) -> str:
        words = [name for kind in self.types if (name := _TYPE_NAMES.get(kind))]
        if self.least is not None:
            words = [f"a number >= {self.least}" if self.choices else f"at least {self.least}"]
        return f"it must be {' or '.join([*words, *map(repr, self.choices)])}"

    def usage(self) -> str:
        """Return `name=…` for the help."""
        if self.shown:
            return f"{self.name}={self.shown}"
        if self.choices and set(self.types) <= {type(None)}:
            return f"{self.name}={'|'.join(self.choices)}"
        if self.types == (bool,):
            return f"{self.name}=true|false"
        return f"{self.name}={'' if self.default in (None, REQUIRED) else self.default}"


_TYPE_NAMES = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list",
    type(None): "null",
}  # fmt: skip


def _is(value: Any, kind: type) -> bool:
    """Return whether a value is of a type; booleans are no numbers, numpy's numbers are."""
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


def keys_of(owner: type, prefix: str = "") -> tuple[Key, ...]:
    """Return the keys that a dataclass declares, in its order; fields without `key` are none."""
    hints = get_type_hints(owner)
    return tuple(
        Key(
            name=f"{prefix}{field.metadata[_NAME] or field.name}",
            field=field.name,
            annotation=hints[field.name],
            default=_default_of(field),
            help=field.metadata[_HELP],
            shown=field.metadata[_SHOWN],
            least=field.metadata[_LEAST],
            is_group=field.metadata[_GROUP],
        )
        for field in dataclasses.fields(owner)
        if _HELP in field.metadata
    )


def _default_of(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def help_lines(keys: Iterable[Key], width: int = 30) -> list[str]:
    """Return lines for each key: how it is written, its help, and its default."""
    indent = " " * (width + 3)
    lines = []
    for one in keys:
        usage = one.usage()
        told = one.default not in (None, REQUIRED, "") and usage != f"{one.name}={one.default}"
        default = str(one.default).lower() if isinstance(one.default, bool) else one.default
        text = f"{one.help} (default: {default})" if told else one.help
        lines += [f"  {usage}"] if len(usage) > width else []
        first = indent if len(usage) > width else f"  {usage:{width}} "
        lines += textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=indent)
    return lines
