"""What a user did wrong, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message says what, where and what to do. The CLI prints it, exits with 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint to append to a message: the known name closest to `word`, or all of them.

    Case does not count; then a name that begins with the word, the closest spelling, and a name
    that holds the word, in this order.
    """
    names = sorted(known)
    lower = {name.lower(): name for name in reversed(names)}
    asked = word.lower()
    starts = [name for name in names if asked and name.lower().startswith(asked)]
    close = difflib.get_close_matches(asked, lower, n=1)
    parts = [name for name in names if len(asked) > 2 and asked in name.lower()]
    for found in ([lower[asked]] if asked in lower else []), starts[:1], close, parts[:1]:
        if found:
            return f"did you mean '{lower.get(found[0], found[0])}'?"
    return "known: " + ", ".join(names)
