"""The error of everything that reads or writes traces."""

from __future__ import annotations

from oled.errors import UserError


class TraceError(UserError):
    """A trace is wrong. The message names file, row, layer and value, and what to do."""
