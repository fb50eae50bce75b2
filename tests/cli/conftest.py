"""The command line as a person uses it, and as one does where torch can not be imported."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import Server, current_environment, run_alone

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[bool], Server]]:
    """The process that runs commands with torch, and the one without; each begun when needed."""
    begun: dict[bool, Server] = {}

    def find(torch: bool) -> Server:
        if torch not in begun:
            begun[torch] = Server(torch)
        return begun[torch]

    yield find
    for server in begun.values():
        server.close()


@pytest.fixture
def oled(tmp_path: Path, servers: Callable[[bool], Server]) -> Run:
    """Return `oled(*words)`, which runs in an empty folder; `torch=False` forbids torch.

    A command is forked from a process that is ready for it. `alone=True`, or a test that changes
    the environment, starts a process of its own.
    """

    def run(
        *words: str, torch: bool = True, alone: bool = False
    ) -> subprocess.CompletedProcess[str]:
        server = servers(torch)
        if alone or current_environment() != server.environment:
            return run_alone([*words], tmp_path, server.poison)
        return server.run([*words], tmp_path)

    return run
