"""Claim folders that results go to: no two runs at once write to one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oled.errors import UserError


def new_folder(parent: Path, name: str) -> Path:
    """Make and return PARENT/NAME, or the first of NAME-2, NAME-3 … that nobody has made."""
    parent.mkdir(parents=True, exist_ok=True)
    number, folder = 1, parent / name
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            folder = parent / f"{name}-{number}"
        else:
            return folder


@contextmanager
def claimed(folder: Path, *, is_new: bool = False) -> Iterator[None]:
    """Hold the claim on a folder inside; leave no new one behind that is still empty.

    Raises UserError where another process, or this one, holds it already.
    """
    is_new = is_new or not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UserError(
            f"{folder}: another run is writing here; wait for it, or choose another out=DIR"
        ) from error
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty, or already gone
                folder.rmdir()
        os.close(handle)
