"""Simulators that copy ahead in a wrong way must be caught, by the wider gates of races, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oled.live.planlog import PlanLog, equal_share
from oled.validate.judge import Pair, judge, row
from oled.validate.pairs import work_ns
from tests.validate import wrong_clock
from tests.validate.wrong_clock import CHANGES, CONFIGURATIONS, NOTHING

REPEATS = 3


@pytest.fixture(scope="module")
def known():
    steps = wrong_clock.steps()
    return steps, wrong_clock.costs(steps)


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """Everything that the program found."""
    out = tmp_path_factory.mktemp("wrong") / "found.npz"
    subprocess.run(
        [sys.executable, "-m", "tests.validate.wrong_clock", str(out)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        check=True,
        timeout=900,
    )
    return np.load(out)


@pytest.fixture(scope="module")
def right(known):
    """The compiled simulator, in the place of the live side."""
    steps, costs = known
    return {one: wrong_clock.simulated(steps, costs, *one) for one in CONFIGURATIONS}


def report(variants, right, known, variant: str) -> dict:
    steps, _ = known
    rows = []
    for policy, slots in CONFIGURATIONS:
        live = right[policy, slots]
        ns, plans, orders, log = (
            variants[f"{variant}|{policy}|{slots}|{name}"]
            for name in ("ns", "plans", "orders", "log")
        )
        tally, entries = live.tally, live.lanes.log[: live.lanes.entries]
        pair = Pair(
            policy=policy,
            slots=slots,
            live_ns=np.stack([tally.end_ns - tally.begin_ns] * REPEATS),
            late_ns=np.zeros((REPEATS, steps.num_forwards), np.int64),
            live_work_ns=np.stack([work_ns(entries, steps.num_forwards)] * REPEATS),
            simulated_ns=ns,
            simulated_work_ns=work_ns(log, steps.num_forwards),
            first_difference=None,  # given what the live link did, decisions are the same
            decided_alike=equal_share(
                PlanLog(tally.plans, tally.orders), PlanLog(plans, orders), steps
            ),
            outputs_identical=True,
            outputs_error=0.0,
            decide_ns=1e6,
        )
        rows.append(row(pair, steps))
    return judge(rows)


def test_the_right_one_passes_and_is_the_same_in_python(variants, right, known):
    found = report(variants, right, known, "right")
    assert found["verdict"] == "pass"
    assert found["tpot_error_max_abs"] == 0.0
    assert found["forward_error_p95_abs"] == 0.0


@pytest.mark.parametrize("variant", [NOTHING, *CHANGES])
def test_a_wrong_one_is_caught(variants, right, known, variant):
    found = report(variants, right, known, variant)
    assert found["verdict"] == "fail", found
