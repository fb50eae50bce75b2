"""Wrong usage: a verb, a key or a group that does not exist, or a value of the wrong kind."""

from __future__ import annotations

from oled.errors import UserError


class UsageError(UserError):
    """The command line itself is wrong: one line on stderr, exit code 2."""
