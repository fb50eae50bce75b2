"""CPU time of the tests: the run's in the last lines, each folder's with `--cpu`.

A test's CPU time is that of its process and of the processes that it started and waited for. What
belongs to no test (imports, collection, processes that tests share) is in the run's sum only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePath

import pytest

KEY = "cpu_s"
elsewhere = [0.0]
"""CPU seconds of commands that a shared process ran for tests and waited for itself."""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it waited for."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu",
        type=int,
        metavar="N",
        help="CPU seconds by folder, and of the N dearest tests",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGAN] = cpu_seconds() + elsewhere[0]
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note the time since the last phase of the test, so that each second is counted once."""
    report = yield
    now = cpu_seconds() + elsewhere[0]
    report.user_properties.append((KEY, now - item.stash[_BEGAN]))
    item.stash[_BEGAN] = now
    return report


_BEGAN = pytest.StashKey[float]()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    write = terminalreporter.write_line
    dearest = config.getoption("--cpu")
    if dearest is not None:
        _by_folder(terminalreporter, dearest)
    write(f"CPU: {cpu_seconds():.0f} s in all, that is {cpu_seconds() / 60:.1f} minutes")


def _by_folder(terminalreporter: pytest.TerminalReporter, dearest: int) -> None:
    """Print a line for each folder of tests and for each of the dearest tests."""
    folders: dict[str, float] = defaultdict(float)
    tests: dict[str, float] = defaultdict(float)
    counted: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            folder = PurePath(report.nodeid.partition("::")[0]).parent
            for name, seconds in report.user_properties:
                if name == KEY:
                    folders[str(folder)] += seconds
                    tests[report.nodeid] += seconds
                    counted[str(folder)].add(report.nodeid)
    write = terminalreporter.write_line
    terminalreporter.section("CPU seconds")
    for folder, seconds in sorted(folders.items(), key=lambda item: -item[1]):
        write(f"{seconds:8.1f}  {folder} ({len(counted[folder])} tests)")
    for test, seconds in sorted(tests.items(), key=lambda item: -item[1])[:dearest]:
        write(f"{seconds:8.1f}  {test}")
