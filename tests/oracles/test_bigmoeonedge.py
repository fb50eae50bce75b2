"""Cache curves published with a recording of Qwen3-30B-A3B, through the product (data README, §1).

One global byte budget over layers with experts of two sizes, or an equal share of it for each
layer; evicted after each step, never what the step used; LRU, LFU and Belady.
"""

from __future__ import annotations

import csv

import numpy as np
import pytest

from oled.policies.allocation.uniform import Uniform
from oled.policies.composition import composition_names, load_composition
from oled.policies.interface import RESIDENT
from oled.policies.prefetch.none import NoPrefetch
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
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
    return PreparedTrace.of(trace_of_records(source.manifest, source.records))


@pytest.mark.parametrize("name", POLICIES)
def test_the_published_curve_to_the_printed_digit(name, folder, subject):
    policy, scope = POLICIES[name]
    rows = list(csv.DictReader((folder / "qwen-curve.csv").open()))
    rows = [row for row in rows if row["policy"] == name]
    assert len(rows) == 11
    for row in rows:
        slots = f"{row['budget_mib']}MiB"
        result = simulate(subject, policy, slots=slots, scope=scope, **ACCOUNTING).metrics
        assert result["accesses_all"] == 39_526
        ours = (
            f"{100 * result['hit_rate_all']:.3f}",
            f"{100 * result['phases']['decode']['hit_rate']:.3f}",
            f"{result['h2d_bytes_all'] / 2**20:.1f}",
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


@pytest.fixture(scope="module")
def served(subject):
    """Every policy that the recording can serve and that needs no calibration, at two sizes."""
    names = [
        name
        for name in composition_names()
        if not load_composition(name).needs & (subject.lacks | {"calibration"})
    ]
    return {
        (name, slots): simulate(subject, name, slots=slots, lifecycle="persistent")
        for name in names
        for slots in (8, 0.5)
    }


def test_no_policy_is_faster_than_the_relaxed_bound(served):
    assert len(served) >= 40
    for (name, slots), result in served.items():
        assert result.metrics["tpot_ns"] >= result.metrics["bound_relaxed_tpot_ns"], (name, slots)


def test_no_uniform_policy_without_prefetch_hits_more_than_the_uniform_oracle(served):
    """The recording's experts are of two sizes, so the pooled oracle is no bound here."""
    for (name, slots), result in served.items():
        composition = load_composition(name)
        uniform = type(composition.allocation) is Uniform and composition.scope != "global"
        if uniform and type(composition.prefetch) is NoPrefetch:
            most = served["oracle", slots].metrics["hits_all"] + result.metrics["initial_residents"]
            assert result.metrics["hits_all"] <= most, (name, slots)
