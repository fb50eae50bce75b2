"""numba, with an on-disk cache that can not go stale.

numba keys a cached function by its own file only: when a function or constant that it uses lives in
another file and changes, the old machine code is used silently. So the cache folder carries a hash
of the sources that compiled code can share, and is set before numba is first imported.
A part of a policy whose file defines no shared function is left out: nothing else is compiled from
it, numba sees that file change by itself, and work on one part does not recompile the engine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COMPILED_PACKAGES = ("policies", "sim", "trace")
_PARTS = ("retention", "allocation", "dispatch", "prefetch")


def _sources_hash() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    root = Path(__file__).parent
    files = (file for name in _COMPILED_PACKAGES for file in (root / name).rglob("*.py"))
    for file in sorted(files):
        source = file.read_bytes()
        if file.parent.name not in _PARTS or b"njit" in source:
            digest.update(str(file.relative_to(root)).encode())
            digest.update(source)
    return digest.hexdigest()[:16]


def cache_dir() -> Path:
    """The folder of this version's machine code: `$OLED_CACHE` or the user's cache folder."""
    base = os.environ.get("OLED_CACHE")
    root = Path(base) if base else Path.home() / ".cache" / "oled"
    folder = root / f"numba-{_sources_hash()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home: compile afresh in each session rather than fail
        return Path(tempfile.gettempdir()) / f"oled-{os.getuid()}" / folder.name
    return folder


os.environ["NUMBA_CACHE_DIR"] = str(cache_dir())

import numba  # noqa: E402  (the folder must be set first)

if os.environ["NUMBA_CACHE_DIR"] != numba.config.CACHE_DIR:  # numba was imported before us
    numba.config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]

njit: Callable[..., Any] = functools.partial(numba.njit, cache=True)
"""`numba.njit(cache=True)`; with NUMBA_DISABLE_JIT=1 the plain function."""

bare_njit: Callable[..., Any] = functools.partial(
    numba.njit, cache=True, _nrt=False, error_model="numpy"
)
"""`njit` for functions that allocate nothing: without reference counting, which would cost a replay
over named tuples of arrays three quarters of its time."""

inner_njit: Callable[..., Any] = functools.partial(
    bare_njit, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""`bare_njit` for functions that only compiled code calls: without the wrappers for Python, which
take longer to compile than most of these functions. From Python use `f.py_func`."""
