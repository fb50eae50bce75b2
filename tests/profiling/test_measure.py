"""What `oled profile` measures, on the emulated lanes and on a device played by queues."""

from __future__ import annotations

import dataclasses
import logging
import os

import numpy as np
import pytest
import torch
import yaml

from oled.errors import UserError
from oled.hardware import load_profile
from oled.hardware.formulas import contention
from oled.hardware.profile import DIMENSIONS
from oled.hardware.shape import ExpertShape
from oled.hardware.this_machine import gpu_facts
from oled.models.catalogue import model_geometry
from oled.profiling import bench, bench_device
from oled.profiling import measure as profiling
from oled.profiling.bench import Spread, Together, timed
from oled.profiling.bench_device import DeviceBench
from oled.profiling.bench_kinds import bench_of
from oled.profiling.bench_lanes import LanesBench
from oled.profiling.file import flops_of, put_in, rate_of, table_of, time_of, write_profile
from tests.hardware.shapes import costs
from tests.live.lazy_device import STREAMS, LazyDevice

SMALL = dataclasses.replace(
    model_geometry("llada2_mini"), name="small", hidden_size=64, moe_intermediate_size=32,
    num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512, shared_intermediate_size=32,
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A fraction of the calls, and layers of two small models in the place of the LLaDA2.0's."""
    monkeypatch.setattr(bench, "_BUDGET_NS", 1_000_000)
    monkeypatch.setattr(bench_device, "_BUDGET_NS", 1_000_000)
    monkeypatch.setattr(profiling, "_MINI", SMALL)
    wide = dataclasses.replace(SMALL, hidden_size=256, shared_intermediate_size=256)
    monkeypatch.setattr(profiling, "_FLASH", wide)
    monkeypatch.setattr(
        profiling.simulator, "decide", lambda _: {"decide_ns_per_forward": 19_000.0}
    )


@pytest.mark.parametrize("link", ["memory", "storage"])
def test_the_lanes_of_the_real_clock_alone_and_beside_each_other(link, tmp_path):
    file = tmp_path / "experts" if link == "storage" else None
    with bench_of("cpu", SMALL, link, file) as made:
        before = os.sched_getaffinity(0)
        measured = profiling.measure(made, SMALL, "2026-11-30")
        assert os.sched_getaffinity(0) == before
    assert list(tmp_path.iterdir()) == []
    profile = load_profile(write_profile(measured, tmp_path / "mine.yaml"))
    assert (profile.name, profile.dtype, profile.device) == ("cpu", "float32", made.device)
    assert profile.gpu_tables[0].expert_bytes == profile.cpu_tables[0].expert_bytes
    assert set(measured["measurements"]["times_slower_beside_another_lane"]) == {
        f"{one} beside {other}"
        for one in ("gpu", "link", "cpu") for other in ("gpu", "link", "cpu") if one != other
    }  # fmt: skip
    assert measured["machine"]["link"] == link
    assert ("queue_depth" in measured["machine"]) == (link == "storage")


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    file = tmp_path / "mine"
    file.write_bytes(b"precious")
    with (
        pytest.raises(UserError, match="is there already"),
        bench_of("cpu", SMALL, "storage", file),
    ):
        pass
    assert file.read_bytes() == b"precious"


def device_bench(**changes):
    device = LazyDevice(STREAMS)
    return device, DeviceBench(
        SMALL, device, **({"block": 2**22, "big": 64, "warm_s": 0.0} | changes)
    )


@pytest.mark.parametrize("backend", ["emulated", "cuda"])
def test_every_part_is_measured_or_absent_with_a_reason(backend, caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="oled")
    made = LanesBench(SMALL) if backend == "emulated" else device_bench()[1]
    measured = profiling.measure(made, SMALL, "2026-11-30")
    file = write_profile(measured, tmp_path / "new" / "mine.yaml")
    profile = load_profile(file)
    assert [
        r.message.partition(" of 5")[0] for r in caplog.records if " of 5" in r.message
    ] == list("12345")
    on_device = backend == "cuda"
    assert profile.dtype == ("bfloat16" if on_device else "float32")
    size = 3 * 64 * 32 * (2 if on_device else 4)
    assert profile.gpu_tables[0].expert_bytes == profile.cpu_tables[0].expert_bytes == size
    assert profile.gpu_tables[0].top_k == 8
    assert "2026-11-30" in profile.host
    assert profile.device == ("lazy device" if on_device else made.device)
    put_in = {name for name, q in profile.quantities().items() if q.tag == "assumed"}
    expected = {"pageable_dram_passes", "cpu_token_tile"}
    assert put_in == expected | (set() if on_device else {"copy_pageable"})
    data = yaml.safe_load(file.read_text())
    told = data["measurements"]
    assert set(told) == {
        "copies", "an expert in so many copies_us", "cpu_expert_by_threads_us",
        "weights_read_at_stream_rate_us", "times_slower_beside_the_other", "dense_layer_small_us",
        "host_calls_us", "deciding_us_per_moe_layer",
    }  # fmt: skip
    memories = {"h2d_pinned_us", "d2h_pinned_us"}
    if on_device:
        memories |= {"h2d_pageable_us", "d2h_pageable_us"}
    assert set(told["copies"]) == {"bytes"} | memories
    for name in memories:
        assert len(told["copies"][name]) == len(told["copies"]["bytes"])
    assert size in told["copies"]["bytes"]
    assert set(data["machine"]) >= {"processor", "cpus", "system", "python", "torch", "date"}
    assert ("pageable copies" in data["absent"]) != on_device
    assert all(isinstance(reason, str) and reason for reason in data["absent"].values())
    assert list(data)[:6] == ["name", "description", "gpu", "host", "dtype", "device"]
    assert [name for name in data if name in DIMENSIONS] == list(DIMENSIONS)


def test_the_cost_model_gives_back_what_was_measured(tmp_path):
    """An expert's copy, launch groups and CPU experts; the slow-down while both run."""
    measured = profiling.measure(LanesBench(SMALL), SMALL, "2026-11-30")
    profile = load_profile(measured)
    whole = dataclasses.replace(SMALL, weight_bytes=4.0)  # float32, as it was measured
    tables = costs(whole, profile, most=64)
    copies = measured["measurements"]["copies"]
    size = ExpertShape.of(whole, 8).bytes
    (_, median, _) = copies["h2d_pinned_us"][copies["bytes"].index(size)]
    host_call = profile.memcpy_host_call.base
    assert tables.copy_ns[0] == pytest.approx(max(1e3 * median, host_call), rel=0.02)
    time = measured["gpu_tables"][0]["time"]["value"]
    assert tables.gpu_ns[0, 16, 32] == pytest.approx(1e3 * time[4][5], rel=0.01)
    assert tables.cpu_ns[0, 16] == pytest.approx(
        1e3 * measured["cpu_tables"][0]["time"]["value"][4][0], rel=0.01
    )
    assert not any("experts of" in label for label in tables.labels)
    slower = measured["measurements"]["times_slower_beside_the_other"].values()
    speed = sum(min(1.0, 1 / times) for times in slower) / 2
    assert tables.cpu_contention_ppm == pytest.approx(1e6 * speed, rel=0.02)


def test_the_benches_memory_is_given_back():
    device, made = device_bench()
    assert len(device.pinned) == 1
    made.close()
    assert device.pinned == []


def test_the_device_bench_computes_what_it_times():
    """A launch group's job gives the products of the slots' experts, which hold the store's."""
    device, made = device_bench(numbers="float32")
    made.warm()
    assert torch.equal(made._slots, made._experts)
    calls = []
    made._events = lambda stream, job, *, queued: calls.append(job) or Spread(1, 1, 1)
    made.group(4, 2, 8)
    (job,) = calls
    job(0)
    assert device.jobs > 0


def test_spread_and_timing():
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(1.4, 3.0, 4.6)
    assert Spread(1, 2, 3).scaled(2) + Spread(1, 1, 1) == Spread(3, 5, 7)
    turns = []
    timed(turns.append, 10)
    assert turns == [0, 1, 2, *range(10)]


def test_numbers_of_a_profile():
    spread = Spread(1_000, 2_000, 4_000)
    assert time_of(spread) == {
        "value": 2.0, "low": 1.0, "high": 4.0, "unit": "us", "tag": "measured",
        "source": "this machine",
    }  # fmt: skip
    rate = rate_of(8_000, spread)
    assert (rate["low"], rate["value"], rate["high"], rate["unit"]) == (2.0, 4.0, 8.0, "GB/s")
    assert flops_of(8_000, spread)["unit"] == "GFLOPS"
    assert put_in(1.0, "1", "why")["tag"] == "assumed"
    table = table_of([[spread, None]])
    assert (table["value"], table["low"], table["high"]) == (
        [[2.0, None]],
        [[1.0, None]],
        [[4.0, None]],
    )


def test_slow_down_is_taken_from_both_sides(monkeypatch):
    """CPU experts twice as slow, copies as fast: the cost model slows both to three quarters.

    It does so for copies of the experts that were measured.
    """
    made = LanesBench(SMALL)
    alone = Spread(10, 10, 10)
    monkeypatch.setattr(made, "together", lambda: Together(alone, alone.scaled(2), alone, alone))
    profile = load_profile(profiling.measure(made, SMALL, "2026-11-30"))
    size = made.form.size * made.numbers.bytes
    assert contention(profile, size, tuned=True, pinned=True) == pytest.approx(0.75, rel=0.01)


def test_what_nvidia_smi_tells_and_does_not(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_facts() == {}
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '570.1, 5, 16, [N/A], 1980 MHz'\n")
    tool.chmod(0o755)
    assert gpu_facts() == {
        "driver": "570.1", "link_generation": "5", "link_width": "16", "clock_limit": "1980 MHz",
    }  # fmt: skip
    tool.write_text("#!/bin/sh\necho 'no devices were found'; exit 6\n")
    assert gpu_facts() == {}


def test_dense_layers_grow_with_tokens_and_context():
    from oled.profiling.bench_dense import Dense

    ran = []
    dense = Dense("cpu", "float32", lambda job: ran.append(job(0)) or Spread(1, 1, 1))
    dense.layer(SMALL, 3, 5)
    dense.layer(dataclasses.replace(SMALL, shared_intermediate_size=0), 1, 0)
    assert [tuple(out.shape) for out in ran] == [(3, 64), (1, 64)]
    assert all(np.isfinite(out.numpy()).all() for out in ran)
    large = dataclasses.replace(SMALL, vocab_size=32_768)
    assert dense.head(large, 2) == Spread(2, 2, 2)  # of half the columns
