"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

UNCLOSED = ".unclosed"
"""The end of the name of a file or folder that is still being written."""


@contextlib.contextmanager
def replaced_file(path: str | Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a path beside `path` to write to, and rename it to `path` once the block has ended.

    Readers see the old file or the new one. After an error the old file stays. With `sync` the
    data and the rename have reached the disk at the end.
    """
    final = Path(path)
    temporary = _beside(final)
    try:
        yield temporary
        if sync:
            to_disk(temporary)
        temporary.replace(final)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if sync:
        to_disk(final.parent)


def write_text(path: str | Path, text: str, *, sync: bool = False) -> Path:
    """Replace a file's content in one step; return its path."""
    with replaced_file(path, sync=sync) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Replace a file's content in one step; return its path."""
    with replaced_file(path) as temporary:
        temporary.write_bytes(data)
    return Path(path)


@contextlib.contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, and rename it to `path` once the block has ended.

    After an error nothing is left.

    Raises:
        FileExistsError: `path` is a file or a folder that holds something.
    """
    final = Path(path).resolve()
    taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise taken
    temporary = _beside(final)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(final)  # onto nothing or an empty folder, else it fails
    except OSError as error:
        if error.filename2 and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise taken from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _beside(path: Path) -> Path:
    """Return a hidden name in the same folder that no other writer uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNCLOSED}")


def to_disk(path: Path) -> None:
    """Wait until a file's data, or a folder's list of files, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
