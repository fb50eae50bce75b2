"""The tables: integer, monotone, sub-additive; labels say what was stretched."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.shapes import FLASH, MINI, PROFILES, RUNTIMES, SDAR, costs, trace_geometry
from oled.hardware import CostTables, build_costs, load_profile, load_runtime
from oled.models.catalogue import MODELS, model_geometry
from oled.trace.schema import Geometry
from tests.support.seeds import sized

IMPORT = Geometry(
    moe_layers=(0, 1, 2),
    experts_per_layer=(8, 6, 4),
    top_k=2,
    expert_bytes=(3_000_000, 2_000_000, 3_000_000),
    num_layers=3,
)
"""What an importer knows: no hidden size, no model; layers differ."""


def tables_of(costs: CostTables) -> dict[str, Any]:
    return {f.name: getattr(costs, f.name) for f in fields(costs)}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("bound", ["value", "low", "high", "fast", "slow"])
def test_costs_are_int64_and_never_negative(profile: str, runtime: str, bound: Any) -> None:
    machine = load_profile(profile).at(bound)
    for geometry in (trace_geometry(MINI), IMPORT):
        for name, value in tables_of(costs(geometry, machine, runtime)).items():
            if isinstance(value, np.ndarray):
                assert value.dtype == np.int64, name
                assert value.flags.c_contiguous, name
                assert value.flags.writeable, name
                assert value.min() >= 0, name
            elif isinstance(value, int):
                assert value >= 0, name


def test_shapes_of_the_tables() -> None:
    geometry = trace_geometry(MINI)
    tables = build_costs(
        geometry,
        np.array([512, 16, 16]),
        np.array([0, 512, 528]),
        32,
        load_profile("h200"),
        load_runtime("graph_fused"),
    )
    assert tables.head_ns.shape == tables.dense_ns.shape == (3,)
    assert tables.gpu_ns.shape == (1, 513, 257)  # the longest forward, not only max_group_tokens
    assert tables.cpu_ns.shape == (1, 513)
    assert tables.act_out_ns.shape == tables.act_back_ns.shape == (513,)
    assert tables.layer_class.tolist() == [0] * 19
    assert tables.expert_bytes.tolist() == [MINI.expert_bytes] * 19


def test_layers_of_different_experts_have_classes() -> None:
    tables = costs(IMPORT)
    assert tables.layer_class.tolist() == [1, 0, 1]
    assert tables.expert_bytes.tolist() == [3_000_000, 2_000_000, 3_000_000]
    assert tables.gpu_ns.shape == (2, 65, 9)
    assert tables.copy_ns[0] < tables.copy_ns[1]


def test_no_work_costs_nothing() -> None:
    tables = costs(MINI, runtime="expert_loop")
    assert (tables.gpu_ns[:, :, 0] == 0).all()
    assert (tables.cpu_ns[:, 0] == 0).all()
    assert tables.act_out_ns[0] == tables.act_back_ns[0] == 0


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("model", [MINI, FLASH, SDAR])
def test_more_work_never_costs_less(profile: str, model: Any) -> None:
    tables = costs(model, profile, most=600)
    assert (np.diff(tables.gpu_ns[0], axis=0)[:, 1:] >= 0).all()
    assert (np.diff(tables.gpu_ns[0], axis=1) >= 0).all()
    assert (np.diff(tables.cpu_ns[0]) >= 0).all()
    assert (np.diff(tables.act_out_ns) >= 0).all()
    forwards = [costs(model, profile, tokens=t, context=c) for t, c in ((16, 0), (16, 9), (900, 9))]
    for a, b in pairwise(forwards):
        assert a.dense_ns[0] <= b.dense_ns[0]
        assert a.head_ns[0] <= b.head_ns[0]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "model", ["tiny", "llada2_mini", "llada2_flash", "sdar_30b", "mixtral_8x7b"]
)
def test_a_slow_machine_is_slow_for_every_model_and_context(profile: str, model: str) -> None:
    """Also below what the profile's points are of, where a steeper part means a lower rest."""
    geometry, machine = model_geometry(model), load_profile(profile)
    for tokens, context in ((16, 0), (16, 100), (16, 4000), (128, 0)):
        ends = [
            costs(geometry, machine.at(bound), tokens=tokens, context=context)
            for bound in ("fast", "value", "slow")
        ]
        for a, b in pairwise(ends):
            assert a.dense_ns[0] <= b.dense_ns[0]
            assert a.head_ns[0] <= b.head_ns[0]
            assert (a.gpu_ns <= b.gpu_ns).all()
            assert (a.cpu_ns <= b.cpu_ns).all()
            assert (a.copy_ns + a.copy_wake_ns <= b.copy_ns + b.copy_wake_ns).all()
            assert (a.act_out_ns + a.act_back_ns <= b.act_out_ns + b.act_back_ns).all()


SPLIT_TABLES = [
    costs(model, load_profile(profile).at(bound), runtime, most=512)
    for profile, bound, model, runtime in (
        ("rtx5090_xeon8470q", "low", FLASH, "graph_fused"),  # its launch may take 0 us
        ("laptop_x8", "value", FLASH, "graph_fused"),
        ("h100_sxm", "slow", MINI, "graph_fused"),
        ("rtx3090", "value", SDAR, "expert_loop"),
    )
]


@settings(max_examples=sized(300))
@given(
    tables=st.sampled_from(SPLIT_TABLES),
    tokens=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    active=st.tuples(st.integers(1, 64), st.integers(1, 64)),
)
def test_one_group_never_costs_more_than_two(
    tables: CostTables, tokens: tuple[int, int], active: tuple[int, int]
) -> None:
    for group in (tables.gpu_ns[0], tables.gpu_kernel_ns[0], tables.gpu_bound_ns[0]):
        two = group[tokens[0], active[0]] + group[tokens[1], active[1]]
        assert group[sum(tokens), sum(active)] <= two


def test_a_launch_takes_time_even_where_a_profile_says_none() -> None:
    tables = costs(MINI, load_profile("rtx5090_xeon8470q").at("low"))
    read_ns = MINI.expert_bytes / 1400e9 * 1e9
    assert tables.gpu_ns[0, 1, 1] > read_ns


def test_tokens_hardly_matter_up_to_64_and_add_what_was_measured_above() -> None:
    # LLMServingSim on this card and shape: 234.3 us at 4 tokens, 235.6 at 64, 32 active experts;
    # 0.12 to 0.26 us a token above
    group = costs(SDAR, "rtx_pro_6000", most=2048).gpu_ns[0]
    assert group[64, 32] / group[4, 32] < 1.03
    slopes = (group[2048] - group[512])[[32, 64, 128]] / 1536
    assert (slopes > 100).all()
    assert (slopes < 280).all()


@pytest.mark.parametrize(
    ("point", "measured_us"),
    [((16, 16), 131), ((16, 128), 818), ((512, 32), 290), ((512, 128), 912), ((2048, 128), 1067)],
)
def test_the_formula_meets_a_measured_grid(point: tuple[int, int], measured_us: float) -> None:
    group = costs(SDAR, "rtx_pro_6000", most=2048).gpu_ns[0]
    assert group[point] / 1e3 == pytest.approx(measured_us, rel=0.09)


def test_runtime_presets_change_what_they_say() -> None:
    bare, eager, loop = (
        costs(MINI, runtime=r) for r in ("graph_fused", "eager_fused", "expert_loop")
    )
    assert bare.dense_ns[0] == bare.dense_kernel_ns[0]
    assert eager.dense_ns[0] == bare.dense_ns[0] + 500_000
    assert loop.dense_ns[0] == bare.dense_ns[0] + 300_000
    assert (eager.gpu_ns == bare.gpu_ns).all()
    assert loop.gpu_ns[0, 16, 49] == 49 * 55_000  # launches hide the kernels
    assert loop.gpu_kernel_ns[0, 16, 49] == bare.gpu_ns[0, 16, 49]
    assert (bare.policy_ns, eager.policy_ns, loop.policy_ns) == (0, 0, 194_000)
    flash = costs(FLASH, "laptop_x8", runtime="expert_loop")
    assert flash.gpu_ns[0, 16, 49] == flash.gpu_kernel_ns[0, 16, 49]  # here the kernels are larger


def test_copies_pinned_and_pageable() -> None:
    pinned, pageable = costs(MINI), costs(MINI, pinned=False)
    assert pinned.copy_ns[0] == round(1500 + MINI.expert_bytes / 55)
    assert pinned.copy_wake_ns == 8500
    assert pageable.copy_ns[0] == round(10_000 + 10_000 + MINI.expert_bytes / 14)
    assert pageable.copy_wake_ns == 0
    assert pageable.copy_out_ns[0] == round(10_000 + 10_000 + MINI.expert_bytes / 8)
    tiny = replace(trace_geometry(MINI), expert_bytes=(1000,) * 19)
    assert costs(tiny).copy_ns[0] == 2500  # the host call


def copied(latency_us: float, rate: float) -> float:
    """GB/s over the whole time of a copy of 6 MiB."""
    return 6.291456e6 / (1e3 * latency_us + 6.291456e6 / rate)


@pytest.mark.parametrize(
    ("profile", "options", "share"),
    [
        ("rtx5090_xeon8470q", {}, 1.0),
        ("rtx5090_xeon8470q_25cpu", {}, 1.0),
        ("a100_pcie", {}, 0.93 * 90 / (75 + copied(1.5, 25))),
        ("rtx4090_desktop", {}, 0.93 * 62 / (58 + copied(1.5, 25))),
        ("rtx4090_desktop", {"pinned": False}, 0.93 * 62 / (58 + 2 * copied(5 + 10, 16))),
        ("rtx4090_desktop", {"kernel": "torch"}, 1.0),
        ("rtx3090", {}, 0.93 * 88 / (65 + copied(1.5, 25))),
    ],
)
def test_contention(profile: str, options: dict[str, Any], share: float) -> None:
    """By the bytes that move: the latency of a copy carries none."""
    assert costs(MINI, profile, **options).cpu_contention_ppm == pytest.approx(1e6 * share, abs=1)


def test_cpu_tokens_are_padded_to_the_tile() -> None:
    amx = costs(FLASH, "rtx5090_xeon8470q_25cpu", kernel="torch", most=400).cpu_ns[0]
    assert amx[385] == amx[400] > amx[384]
    plain = costs(FLASH, "laptop_x8", most=400).cpu_ns[0]
    assert plain[385] < plain[386] < plain[400]


def test_dense_part_by_tokens_and_context() -> None:
    short, long = costs(MINI, context=768), costs(MINI, context=4000)
    assert short.dense_ns[0] == pytest.approx(81_000, rel=0.001)  # the profile's own point
    assert long.dense_ns[0] - short.dense_ns[0] == pytest.approx(21.6 * (4000 - 768), rel=0.01)
    assert costs(MINI, tokens=2048, most=2048).dense_ns[0] > 2 * short.dense_ns[0]
    assert costs(FLASH, context=768).dense_ns[0] == pytest.approx(121_000, rel=0.001)
    between = costs(SDAR, context=768).dense_ns[0]
    assert short.dense_ns[0] < between < 121_000


def test_dense_layers_and_lm_head_are_in_the_head() -> None:
    tables = costs(MINI, context=768)
    assert 440_000 + tables.dense_ns[0] < tables.head_ns[0] < 440_000 + 2 * tables.dense_ns[0]
    assert costs(SDAR, context=768).head_ns[0] == pytest.approx(440_000, rel=0.05)


def test_rescaled_costs_keep_the_trace_and_take_another_model() -> None:
    tables = costs(IMPORT, geometry_override=FLASH)
    flash = costs(FLASH)
    assert tables.labels == ("rescaled: expert bytes, dense and head times of llada2_flash",)
    assert tables.expert_bytes.tolist() == [FLASH.expert_bytes] * 3
    assert tables.gpu_ns.shape == (1, 65, 9)
    assert tables.copy_ns.tolist() == flash.copy_ns.tolist()
    assert tables.head_ns.tolist() == flash.head_ns.tolist()
    assert tables.dense_ns.tolist() == flash.dense_ns.tolist()
    assert tables.provenance["cost_model"] == "llada2_flash"


def test_an_import_without_widths_costs_its_bytes() -> None:
    tables = costs(IMPORT, most=600)
    assert [label.split(":")[0] for label in tables.labels] == ["partial_cost", "partial_cost"]
    assert tables.dense_ns.tolist() == tables.head_ns.tolist() == [0]
    assert (tables.cpu_ns[:, 1:] == tables.cpu_ns[:, 1:2]).all()
    assert tables.act_out_ns[1] == tables.act_out_ns[600] == 10_000


def test_a_model_outside_the_catalogue_has_no_dense_cost() -> None:
    tables = costs(replace(trace_geometry(MINI), name="somebody's model"))
    assert len(tables.labels) == 1
    assert tables.labels[0].startswith("partial_cost: no dense and head times")
    assert tables.cpu_ns.tolist() == costs(MINI).cpu_ns.tolist()


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("llada2_mini", {"most": 5000}, "GPU groups, tokens: 1 to 2048 were measured, 5000 needed"),
        ("llada2_mini", {"context": 8000}, "attention, keys: 1 to 4096 were measured, 8016 needed"),
        ("glm45_air", {}, "dense layers, weights"),
        ("tiny", {}, "dense layers, weights"),
        ("gpt_oss_20b", {}, "experts have 0.53 bytes a weight"),
    ],
)
def test_what_was_not_measured_is_labelled(model: str, options: Any, words: str) -> None:
    labels = [x for x in costs(model_geometry(model), **options).labels if words in x]
    assert len(labels) == 1
    assert labels[0].startswith("extrapolated: ")


@pytest.mark.parametrize("model", [MINI, FLASH, SDAR])
def test_what_was_measured_is_not(model: Any) -> None:
    assert costs(model, most=2048).labels == ()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_has_costs(name: str) -> None:
    tables = costs(model_geometry(name))
    assert tables.head_ns[0] > 0
    assert tables.dense_ns[0] > 0
    assert tables.provenance["profile"] == "rtx5090_xeon8470q"
    json.dumps(dict(tables.provenance))
