"""Run `oled …` in a forked process: isolated like a process of its own, without its start.

A `Server` is a process that has imported the package and replayed a trace once. For each command
it forks: the child changes folder, writes to files of its own, runs `oled.cli.main.main` and ends
with its exit code. So a command inherits no state of Hydra, logging or a policy's modules from the
last one, and still imports and loads nothing. In a server without torch, importing torch or
transformers fails.

    python -m tests.support.commands torch|no-torch     # requests on stdin, answers on stdout
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pkgutil
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.support import cpu_time

ROOT = Path(__file__).parents[2]
POISON = "raise ImportError('torch was imported')\n"
SECONDS = 300
"""A command that takes longer fails its test."""
WARM_UP_SECONDS = 1200
"""The simulator may have to be compiled first, on a machine that does other things, too."""


def current_environment() -> dict[str, str]:
    """Return the environment without the name of the test, which pytest writes there."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def environment(poison: Path | None) -> dict[str, str]:
    """Return this process's environment; with `poison`, torch and transformers raise there."""
    found = dict(os.environ)
    paths = [str(ROOT), *filter(None, [found.get("PYTHONPATH")])]
    if poison is not None:
        for name in ("torch", "transformers"):
            (poison / name).mkdir(parents=True, exist_ok=True)
            (poison / name / "__init__.py").write_text(POISON)
        paths.insert(0, str(poison))
    # The models are so small that more threads only wait for each other.
    return {**found, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run_alone(
    words: list[str], folder: Path, poison: Path | None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, as a shell would."""
    return subprocess.run(
        [sys.executable, "-m", "oled.cli.main", *words],
        cwd=folder,
        env=environment(poison),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


class Server:
    """A process that forks a child for each command; ended by `close`."""

    def __init__(self, torch: bool) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="oled-commands-")
        self.poison = None if torch else Path(self._scratch.name) / "poison"
        self.environment = current_environment()
        self._counted = 0.0
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.commands", "torch" if torch else "no-torch"],
            env=environment(self.poison),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a fork of the server, with the environment of the server's start."""
        if not self._ready:
            self._answer(WARM_UP_SECONDS)
            self._ready = True
        out, err = (Path(self._scratch.name) / name for name in ("out", "err"))
        request = {"words": words, "folder": str(folder), "out": str(out), "err": str(err)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer(SECONDS)
        cpu_time.elsewhere[0] += answer["cpu_s"]
        self._counted += answer["cpu_s"]
        texts = [file.read_text(encoding="utf-8") for file in (out, err)]
        return subprocess.CompletedProcess(["oled", *words], answer["code"], *texts)

    def _answer(self, seconds: float) -> dict[str, Any]:
        """Wait for the server's next line; kill a server that is silent for `seconds`."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._process.kill()
            raise TimeoutError(f"no answer within {seconds} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server of commands has ended; its errors stand above")
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._process.communicate()
        cpu_time.elsewhere[0] -= self._counted  # from now on they are this process's children's
        self._scratch.cleanup()


def _child(request: Mapping[str, Any]) -> int:
    """Become the process of one command; return its exit code."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(request["folder"])
    sys.argv = ["oled", *request["words"]]
    from oled.cli.main import main

    try:
        return main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _leave(code: int) -> NoReturn:
    """End a child as the interpreter ends, threads and pools included, but free no memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _warm_up(torch: bool) -> None:
    """Import what commands import, and load the compiled simulator."""
    import oled
    from oled.sim.api import simulate

    for package in ("cli", *(("live", "quality", "record", "running") if torch else ())):
        for module in pkgutil.walk_packages([f"{oled.__path__[0]}/{package}"], f"oled.{package}."):
            importlib.import_module(module.name)
    if torch:
        from oled.record import overhead

        overhead.MAX_PASSES = 4  # recordings measure their own cost on a few passes only
    simulate("demo", "lru", slots=8)


def serve() -> None:
    """Answer each line of stdin with the exit code and CPU seconds of its command."""
    answers = os.fdopen(os.dup(1), "w")
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _warm_up(torch=sys.argv[1] == "torch")
    print("{}", file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _leave(_child(request))
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        answers.write(json.dumps({"code": code, "cpu_s": usage.ru_utime + usage.ru_stime}) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
