"""The cuda backend on a real device. Nobody has run these yet; they skip where there is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from oled.errors import UserError
from oled.hardware import build_costs, load_profile, load_runtime
from oled.live.routing import Routing, form_of
from oled.live.store import NUMBERS, HostStore
from oled.models.catalogue import model_geometry
from oled.paths import trace_path
from oled.trace import load
from oled.trace.steps import build_steps
from tests.live.build import RESIDENT, run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
MODEL = dataclasses.replace(
    model_geometry("llada2_mini"), name="cut", hidden_size=1024, moe_intermediate_size=512
)
"""Experts of 3 MiB: the demo's 512 are 1.5 GiB, and copies take longer than their computation."""
TOLERANCE = 0.02


def made(numbers):
    trace = load(trace_path("demo"))
    routing = Routing.of(trace, build_steps(trace), 0, 12)
    steps = routing.steps
    form, kind = form_of(trace.geometry, MODEL), NUMBERS[numbers]
    size = form.size * kind.bytes
    own = dataclasses.replace(trace.geometry, expert_bytes=(size,) * steps.num_layers)
    costs = build_costs(
        own, steps.tokens, steps.context, int(steps.tokens.max()),
        load_profile("h200"), load_runtime("graph_fused"), MODEL,
    )  # fmt: skip
    steps = dataclasses.replace(steps, expert_bytes=costs.expert_bytes)
    store = HostStore.random(form, steps.num_experts, numbers=kind)
    return dataclasses.replace(routing, steps=steps), store, costs


@pytest.fixture(scope="module")
def ready():
    return made("bfloat16")


@pytest.fixture(scope="module")
def kind():
    from oled.live.backends.kinds import backend_kind

    return backend_kind("cuda")


@pytest.fixture(scope="module")
def whole(ready, kind):
    return run(ready, RESIDENT, 128, kind=kind).outputs


@pytest.mark.parametrize("policy", ["naive_lru", "lru", "oled_priority", "oled_layeradapt"])
def test_what_the_device_computes_alone_is_bitwise_the_resident_runs(ready, kind, whole, policy):
    for slots, staging in ((20, 8), (0, 1)):
        assert run(ready, policy, slots, kind=kind, staging=staging).outputs == whole


@pytest.mark.parametrize("policy", ["oled", "tide", "cpu_all", "promoe", "hybrimoe", "oled_fill"])
def test_with_experts_on_the_cpu_and_copies_ahead_it_is_so_up_to_rounding(
    ready, kind, whole, policy
):
    assert run(ready, policy, 20, kind=kind).outputs.error(whole) < TOLERANCE


def test_it_computes_what_the_emulated_lanes_do(kind):
    ready = made("float32")
    emulated = run(ready, "lru", 20).outputs
    assert run(ready, "lru", 20, kind=kind).outputs.error(emulated) < TOLERANCE


@pytest.mark.parametrize("numbers", ["float16", "float32"])
def test_other_numbers(kind, numbers):
    ready = made(numbers)
    resident = run(ready, RESIDENT, 128, kind=kind).outputs
    assert run(ready, "lru", 20, kind=kind).outputs == resident
    assert run(ready, "oled", 20, kind=kind).outputs.error(resident) < TOLERANCE


def test_without_the_landing_event_the_outputs_are_wrong(ready, kind, whole, monkeypatch):
    """Slots begin as NaN, and nothing on the compute stream waits for the copies."""
    from oled.live.backends.cuda import Cuda
    from oled.live.backends.device import CudaStream

    prepare = Cuda._prepare

    def with_nothing_in_the_slots(self):
        prepare(self)
        self._slots.fill_(torch.nan)
        torch.cuda.synchronize()

    monkeypatch.setattr(Cuda, "_prepare", with_nothing_in_the_slots)
    assert run(ready, "lru", 20, kind=kind).outputs == whole
    monkeypatch.setattr(CudaStream, "wait", lambda self, event: None)
    assert not run(ready, "lru", 20, kind=kind).outputs.error(whole) < TOLERANCE


def test_the_store_is_pinned_where_it_lies_and_only_for_the_run(ready, kind):
    _, store, costs = ready
    seen = torch.from_numpy(store.block[:1])
    assert not seen.is_pinned()
    backend = kind.make(store, 8, costs, False)
    backend.open(None)
    assert torch.from_numpy(store.block[-1:]).is_pinned()
    backend.close()
    assert not seen.is_pinned()


def test_too_many_slots_are_refused_and_nothing_stays(ready, kind, monkeypatch):
    _, store, costs = ready
    free = torch.cuda.mem_get_info()[0]
    slots = free // store.expert_bytes + 1
    with pytest.raises(UserError, match="of device memory"):
        kind.preflight(0, slots * store.expert_bytes).check()
    backend = kind.make(store, 2 * slots, costs, False)
    with pytest.raises(UserError, match="no memory left"):
        backend.open(None)
    assert torch.cuda.mem_get_info()[0] > 0.9 * free


def test_for_several_runs_the_store_is_pinned_once(ready, kind):
    _, store, _ = ready
    seen = torch.from_numpy(store.block[:1])
    with kind.held(store):
        run(ready, "lru", 20, kind=kind)
        assert seen.is_pinned()
    assert not seen.is_pinned()


def test_what_somebody_else_has_pinned_is_an_error_in_one_line(ready, kind):
    _, store, costs = ready
    calls = torch.cuda.cudart()
    assert calls.cudaHostRegister(store.block.ctypes.data, store.block.nbytes, 0) == 0
    try:
        with pytest.raises(UserError, match="can not be pinned") as told:
            kind.make(store, 8, costs, False).open(None)
        assert "\n" not in str(told.value)
    finally:
        calls.cudaHostUnregister(store.block.ctypes.data)


def test_the_bench_measures_every_part():
    from oled.live.backends.device import CudaDevice
    from oled.profiling.bench_device import DeviceBench
    from oled.profiling.measure import measure

    bench = DeviceBench(MODEL, CudaDevice(), block=2**28)
    try:
        profile = load_profile(measure(bench, MODEL, "today"))
    finally:
        bench.close()
    assert profile.device == torch.cuda.get_device_name()
    assert profile.h2d_pinned.value > profile.h2d_pageable.value


def test_the_command_line_decodes(tmp_path, capsys):
    from oled.cli.main import main

    words = ["run", "model=tiny", "policy=oled", "cache.slots=10", "backend=cuda", "limit=1"]
    assert main([*words, f"out={tmp_path}"]) == 0
    assert "decisions: the simulator's" in capsys.readouterr().out
