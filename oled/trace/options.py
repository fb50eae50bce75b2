"""Options of importers and exporters: key=value words with typed look-ups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from oled.errors import nearest
from oled.trace.errors import TraceError
from oled.trace.fields import brief
from oled.trace.ranges import Ranges

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6}
_UNITS["gb"] = 10**9
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class OptionError(TraceError):
    """An option, or the name of a format, that does not exist or has a wrong value."""


class Options:
    """What was given, and what may be given; errors name the key."""

    def __init__(self, given: Mapping[str, Any], known: Iterable[str], what: str) -> None:
        names = set(known)
        for key in given:
            if key not in names:
                hint = nearest(key, names) if names else "it takes none"
                raise OptionError(f"{what} has no option '{key}'; {hint}")
        self._given = {key: _text(value) for key, value in given.items()}

    @classmethod
    def parse(cls, words: Iterable[str], known: Iterable[str], what: str) -> Self:
        """Read `key=value` words."""
        return cls(split_words(words), known, what)

    def has(self, key: str) -> bool:
        """Return whether an option was given."""
        return key in self._given

    def text(self, key: str) -> str | None:
        """Return the value as it was written."""
        return self._given.get(key)

    def integer(self, key: str) -> int | None:
        """Read a whole number that is not negative."""
        text = self.text(key)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9_]{1,18}", text):
            raise OptionError(f"{key}={brief(text)}: must be a whole number")
        return int(text)

    def number(self, key: str) -> float | None:
        """Read a positive number."""
        text = self.text(key)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise OptionError(f"{key}={brief(text)}: must be a positive number")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Read whole numbers and ranges, as `1-19` or `0,2,4-7`; in the order given."""
        text = self.text(key)
        return None if text is None else Ranges.parse(text, key).numbers(key)

    def size(self, key: str) -> int | None:
        """Read bytes, as `6291456` or `6MiB`."""
        text = self.text(key)
        if text is None:
            return None
        match = re.fullmatch(r"([0-9_]{1,18}(?:\.[0-9]+)?)\s*([A-Za-z]*)", text)
        if match is None or match[2].lower() not in _UNITS:
            raise OptionError(f"{key}={brief(text)}: must be bytes, as 6291456 or 6MiB")
        return round(float(match[1]) * _UNITS[match[2].lower()])

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        text = self.text(key)
        if text is None:
            return default
        if text.lower() not in _WORDS:
            raise OptionError(f"{key}={brief(text)}: must be true or false")
        return _WORDS[text.lower()]

    def choice(self, key: str, known: Iterable[str], default: str) -> str:
        """Read one of a few words."""
        text = self._given.get(key, default)
        if text not in set(known):
            raise OptionError(f"{key}={brief(text)}: {nearest(text, known)}")
        return text


def split_words(words: Iterable[str]) -> dict[str, str]:
    """Read `key=value` words as a mapping."""
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise OptionError(f"{brief(word)} is not key=value")
        if key in found:
            raise OptionError(f"'{key}' is given twice")
        found[key] = value
    return found


def _text(value: Any) -> str:
    if isinstance(value, list | tuple | range):
        return ",".join(map(str, value))
    return str(value)
