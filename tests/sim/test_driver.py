"""One driver, compiled or in Python: the same nanoseconds and the same bytes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from oled.policies.retention.lru import Lru

from .build import Forward, compose, make_steps, replay


@functools.cache
def small_steps():
    rng = np.random.default_rng(1)
    forwards = [
        Forward({la: {int(e): 1 for e in rng.permutation(6)[:3]} for la in range(2)})
        for _ in range(6)
    ]
    return make_steps(forwards, [6, 6])


@dataclasses.dataclass(frozen=True, slots=True)
class PlainLru(Lru):
    """LRU whose kernel is a plain method: the driver runs in Python."""

    def observe(self, step, cache, memory, params) -> None:
        assert step.scores.size == 0


def same(one, other) -> bool:
    """Whether two replays counted, decided and logged the same, byte for byte."""
    return one.lanes.log.tobytes() == other.lanes.log.tobytes() and all(
        a.tobytes() == b.tobytes() for a, b in zip(one.tally, other.tally, strict=True)
    )


def test_a_plain_python_part_runs_on_a_trace_without_router_scores():
    steps = small_steps()
    compiled = replay(steps, compose("demand"), slots=2)
    plain = replay(steps, compose("demand", retention=PlainLru()), slots=2)
    assert same(compiled, plain)


def digest(outcome) -> str:
    """Of everything that a replay counted, decided and logged."""
    data = [outcome.lanes.log, *outcome.tally, outcome.cache.resident, outcome.cache.score]
    return hashlib.sha256(b"".join(a.tobytes() for a in data)).hexdigest()


def long_replay():
    """More than 2,048 layer-steps: recency stamps no longer fit 32 bits."""
    rng = np.random.default_rng(2)
    forwards = [Forward({0: {int(e): 1 for e in rng.permutation(5)[:2]}}) for _ in range(2100)]
    steps = make_steps(forwards, [5], top_k=2)
    return replay(steps, compose("compete"), slots=2, timeline=None)


def test_the_same_bytes_without_compilation():
    code = "from sim.test_driver import digest, long_replay; print(digest(long_replay()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest(long_replay())
