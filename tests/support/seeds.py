"""One seed for everything that is random in the tests; it moves with the commit.

`OLED_TEST_SEED=N` repeats a run, `OLED_TEST_PROFILE=thorough` looks at more random cases. The seed
stands in pytest's header and under every failure. Hypothesis, the order of a run with
`--random-order` and `seeds(n)` begin with it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

SEED = "OLED_TEST_SEED"
PROFILE = "OLED_TEST_PROFILE"
FACTORS = {"quick": 1, "thorough": 10}
WITHOUT_GIT = 20260101
"""The seed where the tests do not lie in a git checkout."""


def _commit_seed() -> int:
    """Return the first 31 bits of the commit's hash."""
    command = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return WITHOUT_GIT
    return int(done.stdout[:8], 16) >> 1


def base_seed() -> int:
    """Return the seed of this run; processes that this one starts have the same."""
    return int(os.environ.setdefault(SEED, str(_commit_seed())))


def sized(cases: int) -> int:
    """Return how many random cases this run looks at where a quick one looks at `cases`."""
    return cases * FACTORS[os.environ.get(PROFILE, "quick")]


def seeds(cases: int) -> range:
    """Return as many seeds as this run wants, beginning with the base seed."""
    return range(base_seed(), base_seed() + sized(cases))


def for_each_seed(cases: int) -> pytest.MarkDecorator:
    """Parametrize a test by `seed`; the test's names do not move with the commit."""
    return pytest.mark.parametrize("seed", seeds(cases), ids=map(str, range(sized(cases))))


def pytest_report_header() -> str:
    profile = os.environ.get(PROFILE, "quick")
    return f"random cases: {profile} ({PROFILE}), seed {base_seed()} ({SEED})"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give Hypothesis and pytest-random-order the base seed where the command line gives none."""
    settings.register_profile("oled", deadline=None, max_examples=sized(100))
    settings.load_profile("oled")
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = base_seed()
    given = config.getoption("random_order_seed", default="")
    if given.startswith("default:"):
        config.option.random_order_seed = f"default:{base_seed()}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.append(("Seed", f"{SEED}={base_seed()} repeats this run's random cases"))
    return report
