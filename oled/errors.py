"""What a user did wrong, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message says what, where and what to do. The CLI prints it, exits with 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Hint at the known name closest to `word`, or name all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return "known: " + ", ".join(names)
