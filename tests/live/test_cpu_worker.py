"""CPU experts beside a device: right in every way, and the fastest way is taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oled.errors import UserError
from oled.live.backends import cpu_worker
from oled.live.backends.cpu_worker import CpuWay, CpuWorker, fastest_way, usable_cpus
from oled.live.backends.device import device_failures
from oled.live.backends.event_log import EventLog
from oled.live.backends.room import _runs
from oled.live.kernels import SILU, ExpertForm
from oled.live.store import NUMBERS, HostStore
from oled.sim import lanes as ln

FORM = ExpertForm(32, 16, False, False, SILU, 0.0, 0.0)


def expected(row, x):
    """By hand, in float64."""
    row, x = row.double(), x.double()
    gate_up, down = row[: 2 * 16 * 32].view(32, 32), row[2 * 16 * 32 :].view(32, 16)
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    return (gate * torch.sigmoid(gate) * up) @ down.T


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("widened", [False, True])
def test_both_ways_are_right(name, widened):
    numbers = NUMBERS[name]
    store = HostStore.random(FORM, np.array([4]), numbers=numbers)
    dtype = getattr(torch, name)
    experts = torch.from_numpy(store.block).view(dtype)
    worker = CpuWorker(FORM, dtype, CpuWay(widened, 1))
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.full((6, 32), torch.nan, dtype=dtype)
    worker.compute([experts[3], experts[0]], [2, 4], x, out)
    right = torch.cat([expected(experts[3], x[:2]), expected(experts[0], x[2:])])
    rounding = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[name]
    assert float((out.double() - right).abs().max()) < rounding * float(right.abs().max())


def test_widened_half_precision_is_rounded_once():
    store = HostStore.random(FORM, np.array([1]), numbers=NUMBERS["bfloat16"])
    experts = torch.from_numpy(store.block).view(torch.bfloat16)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(3, 32, dtype=torch.bfloat16)
    CpuWorker(FORM, torch.bfloat16, CpuWay(True, 1)).compute([experts[0]], [3], x, out)
    assert torch.equal(out, expected(experts[0], x).to(torch.bfloat16))


def test_the_fastest_way_is_taken_and_threads_are_put_back(monkeypatch):
    times = {(False, 4): 9, (False, 2): 7, (False, 1): 8, (True, 4): 6, (True, 2): 5, (True, 1): 7}
    monkeypatch.setattr(cpu_worker, "usable_cpus", lambda: 4)
    monkeypatch.setattr(cpu_worker, "_time", lambda _, __, way: times[way.widened, way.threads])
    before = torch.get_num_threads()
    half = torch.zeros(2, FORM.size, dtype=torch.bfloat16)
    way = fastest_way(FORM, half)
    assert way == CpuWay(True, 2, 5)
    assert way.name(torch.bfloat16) == "bfloat16 widened to float32"
    assert fastest_way(FORM, half.float()) == CpuWay(False, 2, 7)
    assert torch.get_num_threads() == before


def test_the_ways_are_really_timed():
    way = fastest_way(FORM, torch.zeros(2, FORM.size, dtype=torch.bfloat16))
    assert way.expert_ns > 0
    assert 1 <= way.threads <= usable_cpus()


def test_cpus_within_a_containers_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_worker.os, "sched_getaffinity", lambda _: set(range(208)))
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(cpu_worker, "_QUOTA", quota)
    assert usable_cpus() == 208
    for text, cpus in (("2500000 100000", 25), ("max 100000", 208), ("50000 100000", 1)):
        quota.write_text(text)
        assert usable_cpus() == cpus


class Event:
    def __init__(self, ns, done=True):
        self.ns, self.passed = ns, done

    def done(self):
        return self.passed

    def wait(self):
        pass

    def ns_since(self, earlier):
        """As CUDA: milliseconds in 32-bit floats."""
        return int(np.float32((self.ns - earlier.ns) / 1e6) * np.float64(1e6))


class Stream:
    def mark(self):
        return Event(0)


def test_times_of_events_are_the_hosts_and_stay_exact_for_hours():
    entries = []
    log = EventLog(Stream(), entries)
    zero = log._base_ns
    second, last = 1_000_000_000, 2 * 3600 * 1_000_000_000
    for at in range(0, last + 1, 100 * second):
        log.add(ln.LOG_COPY, Event(at), Event(at + 116_000), (7, 3), 5)
        log.settle(Event(at + 200_000))
    assert entries[0] == (ln.LOG_COPY, zero, pytest.approx(zero + 116_000, abs=1), 7, 3, 5)
    kind, begin, end, *_ = entries[-1]
    assert kind == ln.LOG_COPY
    assert abs(begin - zero - last) < 20_000_000  # 3 in a billion
    assert abs(end - begin - 116_000) < 100


def test_entries_wait_for_their_events():
    log = EventLog(Stream(), [])
    late = Event(50, done=False)
    log.add(ln.LOG_PREFETCH, Event(10), late, (0, 0), 1)
    log.add(ln.LOG_HITS, Event(10), Event(40), (0, 0), 2)
    log.settle(Event(60))
    assert log.take().tolist() == [30, 0, 0, 0]
    late.passed = True
    log.settle(Event(60))
    assert log.take().tolist() == [0, 40, 0, 0]
    assert log.take().tolist() == [0, 0, 0, 0]


def test_a_devices_failures_are_one_line():
    for error, said in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nmore"), "no memory left: CUDA"),
        (RuntimeError("CUDA error: an illegal access\nCompile with"), "the device failed: CUDA"),
    ):
        with pytest.raises(UserError, match=said) as told, device_failures():
            raise error
        assert "\n" not in str(told.value)
    with pytest.raises(RuntimeError, match="shapes"), device_failures():
        raise RuntimeError("shapes do not fit")


def test_rows_that_follow_one_another_are_one_run():
    assert list(_runs([4, 0, 2, 9], [2, 2, 2, 1])) == [([1, 2, 0], 0, 6), ([3], 9, 10)]
    assert list(_runs([], [])) == []
