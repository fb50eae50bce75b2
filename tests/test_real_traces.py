"""Bundled recordings of full-size models: whole, small, said to be what they are, and replayed."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from oled.paths import bundled_traces, traces_dir
from oled.sim.api import simulate
from oled.trace import Phase, Trace, load
from oled.trace.check import check
from oled.trace.cut import slice_trace

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "experiments" / "training"))

from real_traces import RECORDINGS, convert  # noqa: E402 - the folder is no package

NAMES = tuple(RECORDINGS)
PUBLIC = ROOT.parent / "shared" / "data" / "routing"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_whole_small_and_listed(name: str) -> None:
    folder = traces_dir() / name
    assert check(folder).ok
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2_000_000
    assert name in bundled_traces()


@pytest.mark.parametrize("name", NAMES)
def test_its_readme_says_origin_licence_and_what_it_lacks(name: str) -> None:
    trace = load(traces_dir() / name, verify=True)
    readme = (trace.path / "README.md").read_text(encoding="utf-8")
    licence = (trace.path / "LICENSE").read_text(encoding="utf-8")
    assert f"`{trace.hash}`" in readme
    assert "github.com/" in readme
    assert any(word in readme and word.split("-")[0] in licence for word in ("Apache-2.0", "MIT"))
    assert [word for word in trace.manifest.lacks if f"`{word}`" not in readme] == []
    table = (trace.path.parent / "README.md").read_text(encoding="utf-8")
    assert f"| {trace.num_forwards} | {len(trace.routing.forward):,} |" in table


@pytest.mark.parametrize("name", NAMES)
def test_the_script_makes_it_again(name: str, tmp_path: Path) -> None:
    if not PUBLIC.is_dir():
        pytest.skip("the folder ../shared/data/routing is not there: public data, not bundled")
    made = convert(name, PUBLIC, tmp_path)
    assert load(made).hash == load(traces_dir() / name).hash


def lru_hits(trace: Trace, slots: int) -> tuple[int, int]:
    """Hits and accesses of decoding, one layer at a time, every request from a cold cache."""
    routing, forwards = trace.routing, trace.forwards
    hits = accesses = 0
    for layer in trace.geometry.moe_layers:
        here = routing.layer == layer
        stamps: dict[int, int] = {}
        request = clock = -1
        starts = np.searchsorted(routing.forward[here], np.arange(trace.num_forwards + 1))
        ids = routing.expert_ids[here].tolist()
        for number, (begin, end) in enumerate(pairwise(starts.tolist())):
            if forwards.request[number] != request:
                request, stamps = forwards.request[number], {}
            used = [expert for row in ids[begin:end] for expert in row]
            if forwards.phase[number] == Phase.DECODE:
                accesses += len(set(used))
                hits += len(set(used) & stamps.keys())
            for expert in used:
                stamps[expert] = clock = clock + 1
            while len(stamps) > slots:
                del stamps[min(stamps, key=stamps.__getitem__)]
    return hits, accesses


@pytest.mark.parametrize(
    ("name", "slots"),
    [("gpt_oss_20b", 8), ("qwen36_35b", 64), ("qwen3_30b_phone", 32), ("qwen3_30b_code", 32)],
)
def test_lru_has_the_hits_of_a_plain_loop(name: str, slots: int) -> None:
    decoded = simulate(name, "lru", slots=slots).metrics["phases"]["decode"]
    found = lru_hits(load(traces_dir() / name), slots)
    assert (decoded["hits"], decoded["accesses"]) == found


def test_gpt_oss_has_the_hit_rates_that_were_computed_apart_from_this_project(
    tmp_path: Path,
) -> None:
    """Its first 4,008 tokens, the cache kept from prompt to prompt, a token's experts as one."""
    first = slice_trace(traces_dir() / "gpt_oss_20b", tmp_path / "t", forwards=range(4008))
    rates = [
        simulate(first, "lru", slots=slots, lifecycle="persistent").metrics["hit_rate"]
        for slots in (4, 8, 16)
    ]
    assert [round(rate, 4) for rate in rates] == [0.4341, 0.6488, 0.8814]
