"""Measured tables: exact on their nodes, linear between, marked and sane beyond."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.shapes import MINI, SDAR, costs, profile_data, table
from oled.hardware import CostTables, load_profile
from oled.hardware.bound import subadditive_minorant
from oled.hardware.labels import foreign
from tests.support.seeds import sized

MEASURED = (
    Path(__file__).parents[3]
    / "shared/data/hardware/llmservingsim/rtxpro6000_qwen3-30b-a3b_moe.csv"
)

GRID = table(
    MINI.expert_bytes,
    [[50, None], [60, 600], [120, 640]],
    tokens=[1, 16, 64],
    active=[8, 128],
    top_k=8,
)
CPU = table(MINI.expert_bytes, [60, 62, 70], tokens=[1, 16, 64])


def with_tables(**tables: Any) -> CostTables:
    return costs(MINI, load_profile(profile_data() | tables), most=500)


def test_inside_a_table_times_are_interpolated() -> None:
    group = with_tables(gpu_tables=[GRID]).gpu_ns[0]
    assert group[16, 8] == 60_000
    assert group[64, 128] == 640_000
    assert group[16, 68] == 330_000
    assert group[40, 68] == 355_000
    assert group[1, 128] == 600_000  # cannot occur: as the next row


def test_outside_a_table_times_follow_the_formula_and_are_labelled() -> None:
    plain, measured = costs(MINI, most=500), with_tables(gpu_tables=[GRID], cpu_tables=[CPU])
    assert plain.labels == ()
    assert measured.labels == (
        "extrapolated: GPU table, tokens: 1 to 64 were measured, 1 to 500 needed",
        "extrapolated: GPU table, active experts: 8 to 128 were measured, 1 to 256 needed",
        "extrapolated: CPU table, tokens: 1 to 64 were measured, 1 to 500 needed",
    )
    for tables in (plain, measured):  # never a flat clamp, never negative
        assert tables.gpu_ns[0, 500, 128] > 1.02 * tables.gpu_ns[0, 64, 128]
        assert tables.gpu_ns[0, 64, 256] > 1.5 * tables.gpu_ns[0, 64, 128]
        assert tables.cpu_ns[0, 500] > 2 * tables.cpu_ns[0, 64]
        assert tables.gpu_ns[0, 1:, 1:].min() > 0
    assert 0 < measured.gpu_ns[0, 1, 1] < measured.gpu_ns[0, 1, 7] < 50_000
    growth = plain.gpu_ns[0, 500, 128] / plain.gpu_ns[0, 64, 128]
    assert measured.gpu_ns[0, 500, 128] == pytest.approx(640_000 * growth, rel=1e-3)


def test_a_cpu_table_counts_for_its_kernel_and_expert_only() -> None:
    assert with_tables(cpu_tables=[CPU]).cpu_ns[0, [1, 16, 40]].tolist() == [60e3, 62e3, 66e3]
    profile = load_profile(profile_data() | {"cpu_tables": [CPU], "gpu_tables": [GRID]})
    for other in (
        {"model": MINI, "kernel": "torch"},
        {"model": SDAR},
    ):
        options = {k: v for k, v in other.items() if k != "model"}
        with_table, without = (
            costs(other["model"], p, **options) for p in (profile, "rtx5090_xeon8470q")
        )
        assert with_table.cpu_ns.tolist() == without.cpu_ns.tolist()
    assert costs(SDAR, profile).gpu_ns.tolist() == costs(SDAR).gpu_ns.tolist()
    used = [c.provenance["measured_tables"] for c in (costs(MINI, profile), costs(SDAR, profile))]
    assert used == [["test", "test"], []]


def test_other_experts_than_the_tables_are_costed_by_formula_and_labelled() -> None:
    profile = load_profile(profile_data() | {"cpu_tables": [CPU], "gpu_tables": [GRID]})
    mini = MINI.expert_bytes
    assert costs(SDAR, profile).labels == (
        f"extrapolated: GPU table: experts of {mini:,} bytes and top-8 were measured, "
        f"{SDAR.expert_bytes:,} bytes and top-8 needed",
        f"extrapolated: CPU table: experts of {mini:,} bytes were measured, "
        f"{SDAR.expert_bytes:,} bytes and top-8 needed",
    )
    assert not [x for x in costs(MINI, profile, most=64).labels if "experts of" in x]


def test_another_devices_profile_is_foreign() -> None:
    mine = load_profile(profile_data() | {"device": "NVIDIA H200"})
    assert foreign(mine, "NVIDIA H200") == []
    (label,) = foreign(mine, "NVIDIA A100")
    assert label == (
        "foreign profile: rtx5090_xeon8470q was measured on NVIDIA H200, this is NVIDIA A100"
    )
    (label,) = foreign(load_profile("h200"), "NVIDIA H200")
    assert "h200 was not measured as one, this is NVIDIA H200" in label


def test_what_a_profile_says_to_its_readers_costs_nothing() -> None:
    more = {"machine": {"driver": "570"}, "measurements": {"copies": {}}, "absent": {"x": "y"}}
    assert load_profile(profile_data() | more) == load_profile(profile_data())


def test_bounds_of_a_table() -> None:
    spread = CPU | {"time": CPU["time"] | {"low": [50, 60, 60], "high": [70, 70, 80]}}
    profile = load_profile(profile_data() | {"cpu_tables": [spread]})
    ends = [profile.at(b) for b in ("low", "value", "high", "fast", "slow")]
    assert [costs(MINI, p).cpu_ns[0, 1] for p in ends] == [50e3, 60e3, 70e3, 50e3, 70e3]


def test_a_bound_stays_under_a_table_that_is_too_fast_for_few_experts() -> None:
    # two groups of 8 (50 us, from L2) undercut one of 16 (130 us)
    cached = table(MINI.expert_bytes, [[50, 130, 900]], tokens=[1], active=[8, 16, 128], top_k=8)
    tables = with_tables(gpu_tables=[cached])
    group, bound = tables.gpu_ns[0], tables.gpu_bound_ns[0]
    assert 2 * group[1, 8] < group[1, 16]
    assert bound[1, 16] <= 2 * group[1, 8]
    assert (bound[16:] <= group[16:]).all()
    one = bound[16]
    for n in range(2, 129):
        assert all(one[n] <= one[a] + one[n - a] for a in range(1, n))


@settings(max_examples=sized(100))
@given(
    times=st.lists(st.lists(st.integers(1, 1000), min_size=9, max_size=9), min_size=3, max_size=3),
    top_k=st.integers(1, 4),
)
def test_the_minorant_is_subadditive_and_below(times: list[list[int]], top_k: int) -> None:
    group = np.array(times, dtype=np.int64)
    group[:, 0] = 0
    floor = subadditive_minorant(group, top_k)
    for n in range(1, 9):
        assert all(floor[0, n] <= floor[0, a] + floor[0, n - a] for a in range(1, n))
        for tokens in range(1, 3):
            if n <= tokens * top_k:  # the pairs that occur
                assert floor[tokens, n] <= group[tokens, n]


@pytest.mark.skipif(not MEASURED.exists(), reason=f"no {MEASURED}: the public data are not here")
def test_a_public_table_is_met_on_its_nodes_and_by_the_formula() -> None:
    rows = [
        (int(r["tokens"]), int(r["activated_experts"]), float(r["time_us"]))
        for r in csv.DictReader(MEASURED.read_text().splitlines())
    ]
    tokens, active = sorted({r[0] for r in rows}), sorted({r[1] for r in rows})
    times = {(t, n): time for t, n, time in rows}
    grid = [[times.get((t, n)) for n in active] for t in tokens]
    public = table(SDAR.expert_bytes, grid, tokens=tokens, active=active, top_k=8)
    profile = load_profile(profile_data("rtx_pro_6000") | {"gpu_tables": [public]})
    measured, formula = (costs(SDAR, p, most=2048).gpu_ns[0] for p in (profile, "rtx_pro_6000"))
    for t, n, time in rows:
        assert measured[t, n] == pytest.approx(1e3 * time, abs=1)
        if n >= 16:  # 8 experts were served from L2
            assert formula[t, n] == pytest.approx(1e3 * time, rel=0.13)
