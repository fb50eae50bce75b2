"""Physical limits of the costs: memory, batches, stored widths; numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.shapes import FLASH, MINI, costs, profile_data, table, trace_geometry
from oled.errors import UserError
from oled.hardware import CostTables, Profile, build_costs, load_profile, load_runtime
from oled.hardware.dense import attention
from oled.models.catalogue import model_geometry
from oled.models.geometry import ModelGeometry
from oled.trace.steps import Rows

MACHINE = "rtx5090_xeon8470q"


def machine(**numbers: str) -> Profile:
    return load_profile(profile_data(MACHINE) | numbers)


def labels(found: CostTables, word: str) -> list[str]:
    return [label for label in found.labels if label.startswith(word)]


def rows(*shape: tuple[int, int]) -> Rows:
    tokens, context = np.array(shape).T
    return Rows(np.zeros(len(shape), np.int64), tokens, context)


def attention_ns(*shape: tuple[int, int], model: ModelGeometry = MINI) -> float:
    return float(attention(load_profile(MACHINE), model, rows(*shape), 1)[0])


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["245 GB/s", "400 GB/s", "1 TB/s"])
def test_no_link_carries_more_than_host_memory_delivers(rate: str) -> None:
    tables = costs(MINI, machine(h2d_pinned=rate, d2h_pinned=rate))
    assert tables.copy_ns[0] == round(1500 + 6_291_456 / 245)
    assert tables.copy_out_ns[0] == round(1500 + 6_291_456 / 245)
    assert tables.act_out_ns[16] == round(10_000 + 16 * 4096 / 245)
    assert len(labels(tables, "capped: h2d_pinned")) == (rate != "245 GB/s")


def test_a_pageable_copy_passes_memory_twice() -> None:
    tables = costs(MINI, machine(h2d_pageable="500 GB/s"), pinned=False)
    assert tables.copy_ns[0] == round(20_000 + 6_291_456 / (245 / 2))
    assert "245 GB/s" not in labels(tables, "capped: h2d_pageable")[0]
    assert "122.5 GB/s" in labels(tables, "capped: h2d_pageable")[0]


def test_experts_on_the_cpu_are_read_no_faster_than_memory_delivers_them() -> None:
    """The roofline: the kernel's 110 GB/s, or STREAM where that is less."""
    for stream, read in ((245, 110), (110, 110), (60, 60), (30, 30)):
        tables = costs(MINI, machine(cpu_stream=f"{stream} GB/s"))
        assert tables.cpu_ns[0, 1] == round(6_291_456 / read), stream
    torch = costs(MINI, machine(cpu_stream="30 GB/s"), kernel="torch")
    assert torch.cpu_ns[0, 1] == round(6_291_456 / 30)


def test_a_measured_cpu_table_is_held_to_memory_too() -> None:
    data = profile_data(MACHINE) | {"cpu_stream": "30 GB/s"}
    data["cpu_tables"] = [table(MINI.expert_bytes, [[60], [70]], tokens=[1, 16])]
    assert costs(MINI, load_profile(data)).cpu_ns[0, 1] == round(6_291_456 / 30)


def test_a_launch_group_reads_no_faster_than_the_gpus_memory() -> None:
    slow = costs(MINI, machine(gpu_mem="1000 GB/s")).gpu_ns
    assert (slow == costs(MINI, machine(moe_eff="1000 GB/s")).gpu_ns).all()
    assert labels(costs(MINI, machine(gpu_mem="1000 GB/s")), "capped: moe_eff")


@pytest.mark.parametrize(
    ("name", "value", "options", "word"),
    [
        ("cpu_stream", "500 GB/s", {}, "cpu_expert_tuned"),
        ("gpu_mem", "2 TB/s", {}, "moe_eff"),
        ("cpu_expert_torch", "90 GB/s", {}, "cost.cpu_kernel=torch"),
        ("cpu_gemm_tuned", "30 TFLOPS", {"kernel": "torch"}, "cost.cpu_kernel=tuned"),
        ("h2d_pageable", "20 GB/s", {}, "cost.pinned=false"),
        ("dram_share", "0.95", {}, "ask for less"),
    ],
)
def test_a_number_that_changes_nothing_says_so(
    name: str, value: str, options: dict[str, Any], word: str
) -> None:
    found = labels(costs(MINI, machine(**{name: value}), **options), "no effect: ")
    assert len(found) == 1
    assert f"hardware.{name}" in found[0]
    assert word in found[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("cpu_stream", "60 GB/s"), ("h2d_pinned", "25 GB/s"), ("moe_t0", "1 us"),
     ("gpu_mem", "1 TB/s"), ("attention_key", "5 ns"), ("cpu_call", "1 us"),
     ("copy_isolated", "12 us")],
)  # fmt: skip
def test_a_number_that_counts_says_nothing(name: str, value: str) -> None:
    assert labels(costs(MINI, machine(**{name: value})), "no effect: ") == []


# --- batches ------------------------------------------------------------------------------------


def test_attention_of_a_batch_by_hand() -> None:
    """Each row attends to its own keys: 32 rows are 32 times the arithmetic of one, not 1,024."""
    flops = 4 * 16 * 128  # of a pair of query and key
    prefill = flops * 1024 * 1024 / 210e12 * 1e9
    assert attention_ns((1024, 0)) == pytest.approx(prefill)
    assert attention_ns(*32 * [(1024, 0)]) == pytest.approx(32 * prefill)  # 1.31 ms
    decode = 32 * 1025 * 2048 / 1500e9 * 1e9  # KV bytes of 4 heads of 128, key and value, bf16
    assert attention_ns(*32 * [(1, 1024)]) == pytest.approx(decode)  # 0.045 ms
    blocks = 784 * 21.6  # 16 queries: the slope of one sequence; two run side by side
    assert attention_ns((16, 768)) == attention_ns(*2 * [(16, 768)]) == pytest.approx(blocks)


@pytest.mark.parametrize(
    ("profile", "batch", "context", "measured_us", "launch_us"),
    [
        ("rtx_pro_6000", 1, 4095, 19.17, 13.1),
        ("rtx_pro_6000", 32, 4095, 200.62, 13.1), ("rtx_pro_6000", 32, 8191, 373.74, 13.1),
        ("h100_sxm", 32, 4095, 98.85, 12.4), ("h100_sxm", 32, 8191, 184.34, 12.4),
        ("h200", 16, 8191, 76.13, 12.6), ("h200", 32, 8191, 134.65, 12.6),
    ],
)  # fmt: skip
def test_single_queries_meet_measured_kernels(
    profile: str, batch: int, context: int, measured_us: float, launch_us: float
) -> None:
    """Generation rows of [AIC], 16 heads and 4 of KV, less the kernel's floor (its time at 255)."""
    made = attention(load_profile(profile), MINI, rows(*batch * [(1, context)]), 1)[0]
    off = made / 1e3 + launch_us - measured_us
    assert abs(off) < 0.15 * measured_us


SHAPES = st.tuples(st.integers(1, 600), st.integers(0, 3000))
MODELS = st.sampled_from([MINI, FLASH, *map(model_geometry, ("gpt_oss_20b", "deepseek_v2_lite"))])


@settings(max_examples=200, deadline=None)
@given(model=MODELS, shapes=st.lists(SHAPES, min_size=1, max_size=12))
def test_a_batch_costs_at_least_its_longest_row_and_at_most_their_sum(
    model: ModelGeometry, shapes: list[tuple[int, int]]
) -> None:
    alone = [attention_ns(shape, model=model) for shape in shapes]
    together = attention_ns(*shapes, model=model)
    assert max(alone) * (1 - 1e-9) <= together <= sum(alone) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(model=MODELS, shape=SHAPES, batch=st.integers(1, 40))
def test_the_work_of_equal_rows_adds_up(
    model: ModelGeometry, shape: tuple[int, int], batch: int
) -> None:
    """With enough rows the GPU is full: twice as many rows take twice as long."""
    many = 2000
    assert attention_ns(*2 * many * [shape], model=model) == pytest.approx(
        2 * attention_ns(*many * [shape], model=model)
    )
    one, more = attention_ns(shape, model=model), attention_ns(*batch * [shape], model=model)
    assert one * (1 - 1e-9) <= more <= batch * one * (1 + 1e-9)


def test_a_batch_is_not_labelled_for_the_sum_of_its_keys() -> None:
    batch = rows(*4 * [(16, 2000)])
    tables = build_costs(
        trace_geometry(MINI), np.array([64]), np.array([8000]), 64,
        load_profile(MACHINE), load_runtime("graph_fused"), rows=batch,
    )  # fmt: skip
    assert labels(tables, "extrapolated: attention") == []


# --- what is stored -----------------------------------------------------------------------------


def test_experts_without_a_gate_have_two_matrices() -> None:
    """From their bytes where nobody says it: 2 x 2048 x 512 weights of two bytes."""
    geometry = replace(
        trace_geometry(MINI), name="somebody's", expert_bytes=(2 * 2 * 2048 * 512,) * 19
    )
    tables = costs(geometry, most=600)
    assert tables.cpu_ns[0, 592] == round(2 * 2 * 2048 * 512 * 592 / 21e12 * 1e9)
    assert not any("bytes a weight" in label for label in tables.labels)
    ungated = replace(MINI, matrices=2, name="ungated")
    assert ungated.expert_bytes == 2 * 2 * 2048 * 512
    assert costs(MINI, geometry_override=ungated, most=600).cpu_ns[0, 592] == tables.cpu_ns[0, 592]
    assert MINI.moe_layer_params - ungated.moe_layer_params == 2048 * 512  # of the shared expert


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen3_30b", 9_437_184), ("qwen3_30b@bf16", 9_437_184), ("qwen3_30b@fp8", 4_718_592),
        ("qwen3_30b@q8_0", 5_013_504), ("qwen3_30b@q4_0", 2_654_208),
        ("qwen3_30b@iq4_xs", 2_506_752), ("qwen3_30b@mxfp4", 2_506_752),
        ("qwen3_30b@q4_k_m", 2_856_960),  # 17,553,162,240 bytes of 48 x 128 experts
    ],
)  # fmt: skip
def test_stored_formats(name: str, size: int) -> None:
    model = model_geometry(name)
    assert model.expert_bytes == size
    tables = costs(MINI, geometry_override=model)
    assert tables.cpu_ns[0, 1] == round(size / 110)
    assert tables.copy_ns[0] == round(1500 + size / 55)
    assert bool(labels(tables, "extrapolated: rates were measured")) == (size != 9_437_184)


def test_unknown_formats_are_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no weight format 'q4_k_n'.*q4_k_m"):
        model_geometry("qwen3_30b@q4_k_n")


def test_dense_weights_and_keys_as_stored() -> None:
    half = replace(MINI, dense_weight_bytes=1.0, kv_bytes=1.0)
    assert half.other_bytes == MINI.other_params
    assert half.kv_bytes_per_token == MINI.kv_bytes_per_token // 2
    assert attention_ns((16, 768), model=half) == attention_ns((16, 768)) / 2
    profile = load_profile(MACHINE)
    whole, narrow = (costs(MINI, profile, geometry_override=m) for m in (MINI, half))
    per_weight = (121_000 - 81_000) / (FLASH.moe_layer_params - MINI.moe_layer_params)
    saved = MINI.moe_layer_params / 2 * per_weight + 784 * 21.6 / 2
    assert whole.dense_ns[0] - narrow.dense_ns[0] == pytest.approx(saved, abs=1)
    assert narrow.head_ns[0] < whole.head_ns[0] - 200_000  # half of the 440 us of lm_head


def test_layers_with_a_window_attend_to_no_more() -> None:
    """gpt-oss: every other layer sees the last 128 tokens; 8 KV heads of 64."""
    model = model_geometry("gpt_oss_20b")
    whole = replace(model, window=0, window_layers=0)
    key = 2 * 8 * 64 * 2 / 1500  # ns of one key's bytes
    assert attention_ns((1, 4095), model=whole) == pytest.approx(4096 * key)
    assert attention_ns((1, 4095), model=model) == pytest.approx((4096 + 128) / 2 * key)
    assert attention_ns((1, 99), model=model) == attention_ns((1, 99), model=whole)
    assert model.kv_bytes_total(4096) == (12 * 4096 + 12 * 128) * 2 * 8 * 64 * 2
    assert whole.kv_bytes_total(4096) == 4096 * whole.kv_bytes_per_token


# --- a better machine ---------------------------------------------------------------------------

FASTER = st.sampled_from(["h2d_pinned", "d2h_pinned", "cpu_stream", "gpu_mem", "moe_eff",
                          "cpu_expert_tuned", "cpu_gemm_tuned", "bf16_peak"])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(name=FASTER, low=st.floats(0.05, 20), more=st.floats(1, 20))
def test_no_cost_rises_with_a_faster_part(name: str, low: float, more: float) -> None:
    base = load_profile(MACHINE)
    slow, fast = (costs(MINI, base.scaled(name, by), most=32) for by in (low, low * more))
    for part in ("head_ns", "dense_ns", "gpu_ns", "cpu_ns", "act_out_ns", "copy_ns", "copy_out_ns"):
        assert (getattr(fast, part) <= getattr(slow, part)).all(), part


@settings(max_examples=60, deadline=None)
@given(
    link=st.floats(1, 2000),
    stream=st.floats(20, 500),
    kernel=st.floats(5, 500),
    pinned=st.booleans(),
)
def test_copies_and_cpu_experts_never_take_more_than_memory_gives(
    link: float, stream: float, kernel: float, pinned: bool
) -> None:
    profile = machine(
        h2d_pinned=f"{link} GB/s", h2d_pageable=f"{link} GB/s", cpu_stream=f"{stream} GB/s",
        cpu_expert_tuned=f"{kernel} GB/s",
    )  # fmt: skip
    tables = costs(MINI, profile, pinned=pinned)
    size = MINI.expert_bytes
    copied = (1 if pinned else 2) * size / tables.copy_ns[0]
    read = size / tables.cpu_ns[0, 1]
    assert max(copied, read) <= stream * (1 + 1e-4)  # whole nanoseconds
    together = (copied + read) * tables.cpu_contention_ppm / 1e6
    assert together <= 0.93 * stream * (1 + 1e-4)
