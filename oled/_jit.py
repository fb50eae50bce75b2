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
import sys
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
        if file.parent.name not in _PARTS or b"oled._jit" in source:
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

from numba.core.codegen import JITCodeLibrary  # noqa: E402
from numba.core.compiler import CompilerBase, DefaultPassBuilder  # noqa: E402
from numba.core.compiler_machinery import LoweringPass, register_pass  # noqa: E402
from numba.core.environment import lookup_environment  # noqa: E402
from numba.core.typed_passes import NativeLowering  # noqa: E402
from numba.extending import overload, register_jitable  # noqa: E402


class _InnerLibrary(JITCodeLibrary):  # type: ignore[misc]
    """LLVM code that is only ever linked into a caller: optimised and compiled there, once.

    By default numba optimises and compiles a function anew with each function that calls it, at
    every level of the calls; that was two thirds of the time of compiling the driver.
    """

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Leave it to the caller, in whose code the function ends up: `_FindEnvironments`."""


class _OuterLibrary(JITCodeLibrary):  # type: ignore[misc]
    """LLVM code without reference counting: one round of optimisation, not one for counts first."""

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        with self._recorded_timings.record("Module passes", builder):
            passes.run(self._final_module, builder)


def _library_pass(library: type[JITCodeLibrary], name: str) -> Any:
    """Return a pass that lets numba lower a function into this kind of library."""

    class CreateLibrary(LoweringPass):  # type: ignore[misc]
        _name = name

        def __init__(self) -> None:
            LoweringPass.__init__(self)

        def run_pass(self, state: Any) -> bool:
            function = state.func_id.func_qualname
            state.library = library(state.targetctx.codegen(), function)
            state.library.enable_object_caching()
            return True

    return register_pass(mutates_CFG=False, analysis_only=False)(CreateLibrary)


_CreateInner = _library_pass(_InnerLibrary, "create_inner_library")
_CreateOuter = _library_pass(_OuterLibrary, "create_outer_library")


@register_pass(mutates_CFG=False, analysis_only=False)
class _FindEnvironments(LoweringPass):  # type: ignore[misc]
    """Give the functions that were linked in what they need of Python: their exceptions."""

    _name = "find_environments"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        library = state.library
        for variable in library._final_module.global_variables:
            if variable.name.startswith("_ZN08NumbaEnv"):
                environment = lookup_environment(variable.name)
                if environment is not None:
                    library.codegen.set_env(variable.name, environment)
        return True


class _InnerCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes._finalized = False
        names = [entry[0] for entry in passes.passes]
        passes.passes.insert(names.index(NativeLowering), (_CreateInner, "inner library"))
        passes.finalize()
        return [passes]


class _OuterCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes._finalized = False
        names = [entry[0] for entry in passes.passes]
        passes.passes.insert(names.index(NativeLowering), (_CreateOuter, "outer library"))
        passes.add_pass_after(_FindEnvironments, NativeLowering)
        passes.finalize()
        return [passes]


njit: Callable[..., Any] = functools.partial(numba.njit, cache=True)
"""`numba.njit(cache=True)`; with NUMBA_DISABLE_JIT=1 the plain function."""

_BARE = {"_nrt": False, "error_model": "numpy"}
_INNER = {
    **_BARE,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _InnerCompiler,
}

bare_njit: Callable[..., Any] = functools.partial(
    numba.njit, cache=True, pipeline_class=_OuterCompiler, **_BARE
)
"""`njit` for functions that allocate nothing, called from Python: without reference counting, which
would cost a replay three quarters of its time."""

jitable: Callable[..., Any] = register_jitable(**_INNER)
"""Plain Python when called from Python; in compiled code a part of what calls it."""


def shared_njit(function: Callable[..., Any]) -> Any:
    """Compile a function for both: `bare_njit` from Python, `jitable` in compiled code."""
    compiled = bare_njit(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return compiled(*args)

    call.py_func = function  # type: ignore[attr-defined]
    overload(call, jit_options=_INNER, strict=False)(lambda *args: function)
    return call


def announce_compilation() -> None:
    """Say on stderr that the first use compiles, if this version's loop was never compiled."""
    known = any(Path(numba.config.CACHE_DIR).rglob("replay.replay-*.nbi"))
    if not known and not numba.config.DISABLE_JIT:
        sys.stderr.write("oled: compiling the simulator for this machine, once (about 15 s)\n")
        sys.stderr.flush()
