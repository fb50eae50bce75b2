"""Typed look-ups in a JSON object whose errors name the file and the key."""

from __future__ import annotations

import json
import re
import reprlib
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from oled.trace.errors import TraceError
from oled.types import Ints

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

V = TypeVar("V")
E = TypeVar("E", bound=StrEnum)


def brief(value: object) -> str:
    """Return a value as a message may quote it: one line, and short."""
    return reprlib.repr(value)


def parse_json(text: str, where: str) -> Any:
    """Return the value that a JSON text holds; its strings can be written and printed."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):  # half a character, by itself, has no bytes
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not readable as JSON ({error}); restore it") from None


class JsonFields:
    """A JSON object together with the words that say where it comes from."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise TraceError(f"{where}: expected a JSON object, found {type(data).__name__}")
        self.data: dict[str, Any] = data
        self.where = where

    def get(self, key: str, kind: type[V]) -> V:
        """Return the value of `key`, which must be there and of this kind."""
        if key not in self.data:
            raise TraceError(f"{self.where}: '{key}' is missing")
        value = self.data[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TraceError(f"{self.where}: '{key}' must be {kind.__name__}, found {brief(value)}")
        return value

    def has(self, key: str) -> bool:
        """Return whether there is a value that is not null."""
        return self.data.get(key) is not None

    def optional(self, key: str, kind: type[V]) -> V | None:
        """Return the value of `key`, or None where it is null or missing."""
        return None if self.data.get(key) is None else self.get(key, kind)

    def number(self, key: str) -> float | None:
        """Return a number, or None where it is null or missing."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TraceError(f"{self.where}: '{key}' must be a number, found {brief(value)}")
        return float(value)

    def items(self, key: str, kind: type[V]) -> tuple[V, ...]:
        """Return a list whose items are all of one kind."""
        values = self.get(key, list)
        for value in values:
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TraceError(
                    f"{self.where}: '{key}' must hold {kind.__name__}, found {brief(value)}"
                )
        return tuple(values)

    def int_array(self, key: str) -> Ints:
        """Return a list of whole numbers as an array: i64[n]."""
        values = self.items(key, int)
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            raise TraceError(f"{self.where}: '{key}' holds a number beyond 64 bits") from None

    def choice(self, key: str, kind: type[E]) -> E:
        """Return a member of a string enumeration."""
        value = self.get(key, str)
        if value not in set(kind):
            raise TraceError(f"{self.where}: '{key}' is {brief(value)}; known: {', '.join(kind)}")
        return kind(value)
