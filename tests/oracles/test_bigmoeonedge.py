"""Cache curves published with a recording of Qwen3-30B-A3B, through the product (data README, §1).

One global byte budget over layers with experts of two sizes, or an equal share of it for each
layer; evicted after each step, never what the step used; LRU, LFU and Belady.
"""

from __future__ import annotations

import csv

import numpy as np
import pytest

from oled.policies.interface import RESIDENT
from oled.sim.api import simulate
from oled.sim.subject import Subject
from oled.trace.importers import read_source
from oled.trace.memory import trace_of_records
from oled.trace.schema import Phase

ACCOUNTING = {"staging": "unbounded", "lifecycle": "persistent", "references": False}
POLICIES = {  # the name there: our policy and scope
    "lru": ("lru", "global"),
    "lfu": ("lfu", "global"),
    "belady": ("belady", "global"),
    "layer": ("lru", "layer"),
    "layerlfu": ("lfu", "layer"),
}


@pytest.fixture(scope="module")
def folder(recording):
    return recording("bigmoeonedge")


@pytest.fixture(scope="module")
def subject(folder):
    source = read_source("bigmoeonedge", folder / "qwen.route.csv")
    return Subject.of(trace_of_records(source.manifest, source.records))


@pytest.mark.parametrize("name", POLICIES)
def test_the_published_curve_to_the_printed_digit(name, folder, subject):
    policy, scope = POLICIES[name]
    rows = list(csv.DictReader((folder / "qwen-curve.csv").open()))
    rows = [row for row in rows if row["policy"] == name]
    assert len(rows) == 11
    for row in rows:
        slots = f"{row['budget_mib']}MiB"
        result = simulate(subject, policy, slots=slots, scope=scope, **ACCOUNTING).metrics
        assert result["accesses"] == 39_526
        ours = (
            f"{100 * result['hit_rate']:.3f}",
            f"{100 * result['phases']['decode']['hit_rate']:.3f}",
            f"{result['h2d_bytes'] / 2**20:.1f}",
        )
        theirs = (row["hit_pct_cum"], row["hit_pct_decode"], row["read_mib"])
        assert ours == theirs, f"{name} at {slots}"


def test_every_decoded_access_hits_or_misses_as_on_the_device(folder, subject):
    """The recording was made with a real LRU cache of 4000 MiB, whose hits are a column of it."""
    result = simulate(subject, "lru", slots="4000MiB", scope="global", plans=True, **ACCOUNTING)
    steps = subject.steps
    forward = steps.forward[np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))]
    layer = steps.layer[np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))]
    decode = steps.phase[forward] == Phase.DECODE
    hit = (result.replay.tally.plans & 3) == RESIDENT
    ours = dict(
        zip(
            zip(
                (forward[decode] + 27).tolist(),  # tokens 0 to 27 are forward 0
                layer[decode].tolist(),
                steps.expert[decode].tolist(),
                strict=True,
            ),
            hit[decode].tolist(),
            strict=True,
        )
    )
    lines = (folder / "qwen.route.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    theirs = {
        (int(row["step"]), int(row["layer"]), int(row["expert"])): row["residency"] == "1"
        for row in rows
        if row["phase"] == "1"
    }
    assert sum(theirs.values()) == 29_597
    assert ours == theirs
