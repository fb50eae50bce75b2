"""The cuda backend on a device of FIFO queues: right results, and every removed wait is seen.

Nothing here needs a GPU: `LazyDevice` orders work as CUDA's streams and events may, at their worst.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from oled.errors import UserError
from oled.live.backends import LaneError
from oled.live.backends.cpu_worker import CpuWay
from oled.live.backends.cuda import Cuda, cuda_kind
from oled.live.executor import Executor
from oled.live.outputs import Outputs
from oled.live.store import NUMBERS, HostStore
from oled.sim.lanes import LOG_COPY, LOG_HITS, LOG_LANDED
from tests.live.build import RESIDENT, demo, run, same_decisions
from tests.live.lazy_device import LazyDevice

GREEDY = ((), ("copy",), ("compute", "out", "in"), ("compute", "copy", "out", "in"))
"""Everything late; copies early; computation early; everything early."""
ONE_THREAD = CpuWay(widened=False, threads=1)
POLICIES = ("naive_lru", "lru", "oled_priority", "oled_layeradapt", "inter_iteration")
ON_CPU = ("oled", "tide", "cpu_all", "oled_exact")
AHEAD = ("promoe", "hybrimoe", "oled_fill")
ROUNDING = 1e-5


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So that jobs give the same bits whoever runs them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def few():
    return demo(forwards=5)


@pytest.fixture(scope="module")
def whole(few):
    """The same with every expert in a slot, on the same backend."""
    return live(few, RESIDENT, 128, LazyDevice()).outputs


def live(ready, policy, slots, device, **fields):
    return run(ready, policy, slots, kind=cuda_kind(device, ONE_THREAD), **fields)


@pytest.mark.parametrize("greedy", GREEDY)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_device_computes_alone_is_bitwise_the_resident_runs(few, whole, policy, greedy):
    for slots, staging in ((20, 8), (0, 1)):
        done = live(few, policy, slots, LazyDevice(greedy), staging=staging)
        assert done.outputs == whole
        assert same_decisions(done, few, policy, slots, staging=staging)


@pytest.mark.parametrize("greedy", GREEDY)
@pytest.mark.parametrize("policy", [*ON_CPU, *AHEAD, "tide_artefact"])
def test_with_experts_on_the_cpu_and_copies_ahead_it_is_so_up_to_rounding(
    few, whole, policy, greedy
):
    done = live(few, policy, 20, LazyDevice(greedy))
    assert done.outputs.error(whole) < ROUNDING


@pytest.mark.parametrize("seed", range(6))
def test_streams_may_take_any_turns(few, whole, seed):
    for policy, staging in (("oled_priority", 1), ("oled", 8), ("hybrimoe", 8)):
        done = live(few, policy, 20, LazyDevice(seed=seed), staging=staging)
        assert done.outputs.error(whole) < ROUNDING


def test_it_computes_what_the_emulated_lanes_do(few, resident_few, whole):
    assert whole.error(resident_few) < ROUNDING


@pytest.fixture(scope="module")
def resident_few(few):
    return run(few, RESIDENT, 128).outputs


@pytest.mark.parametrize(
    ("waiting", "awaited", "policy", "greedy"),
    [
        ("compute", "copy", "lru", ()),  # for a landing
        ("compute", "copy", "promoe", ()),  # for one that was copied ahead
        ("copy", "compute", "oled_priority", ("copy",)),  # for the last use of a slot
        ("copy", "compute", "hybrimoe", ("copy",)),
        ("compute", "in", "oled", ()),  # for outputs of the CPU
        ("out", "compute", "oled", ()),  # for activations
    ],
)
def test_without_a_wait_the_outputs_are_wrong(
    few, whole, monkeypatch, waiting, awaited, policy, greedy
):
    run = Executor.run

    def on_what_was_just_computed(self, step, side, ids, weight, x):
        """As a model's own layers leave it: on its way on the compute stream."""
        return run(self, step, side, ids, weight, self.backend.adopt(x))

    monkeypatch.setattr(Executor, "run", on_what_was_just_computed)

    def ignored(stream, event):
        return (stream.name, event.stream.name) == (waiting, awaited)

    fields = {"staging": 1} if policy == "oled_priority" else {}
    broken = live(few, policy, 20, LazyDevice(greedy, ignored=ignored), **fields)
    assert broken.outputs.error(whole) > 0.01
    sound = live(few, policy, 20, LazyDevice(greedy), **fields)
    assert sound.outputs.error(whole) < ROUNDING


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_is_right_within_its_rounding(few, whole, name):
    routing, store, costs = few
    numbers = NUMBERS[name]
    half = HostStore(store.form, store.first, store.num_experts, numbers.of(store.block), numbers)
    for policy in ("lru", "oled"):
        done = live((routing, half, costs), policy, 20, LazyDevice())
        assert 0 < done.outputs.error(whole) < 0.02


def test_lanes_keep_the_order_of_their_work(few):
    entries = live(few, "lru", 20, LazyDevice(), paced=True).entries
    assert {int(k) for k in entries[:, 0]} >= {LOG_COPY, LOG_HITS, LOG_LANDED}
    assert (entries[:, 2] >= entries[:, 1]).all()
    copies = entries[entries[:, 0] == LOG_COPY]
    assert (copies[1:, 1] >= copies[:-1, 2]).all()
    groups = entries[np.isin(entries[:, 0], (LOG_HITS, LOG_LANDED))]
    assert (groups[1:, 1] >= groups[:-1, 2]).all()
    for forward, layer in {(f, n) for f, n in copies[:, 3:5].tolist()}:
        mine = copies[(copies[:, 3] == forward) & (copies[:, 4] == layer)]
        last = groups[(groups[:, 3] == forward) & (groups[:, 4] == layer)][-1]
        assert last[1] >= mine[:, 2].max()


def test_times_are_of_the_lanes_and_steps_are_waited_for(few):
    done = live(few, "lru", 20, LazyDevice(), paced=True)
    assert (done.end_ns > done.begin_ns).all()
    assert (done.work_ns[:, 0] > 0).all()
    assert done.work_ns[:, 1].sum() > 0


def test_memory_is_pinned_for_the_run_only(few):
    device = LazyDevice()
    live(few, "lru", 20, device)
    assert device.pinned == []
    _, store, _ = few
    backend = Cuda(store, 8, LazyDevice(), ONE_THREAD, paced=False)
    backend.open(None)
    assert backend._device.pinned == [store.block.ctypes.data]
    backend.close()
    assert backend._device.pinned == []


def test_for_several_runs_it_is_pinned_once_and_the_cpus_way_found_once(few, monkeypatch):
    from oled.live.backends import cuda

    device, timed = LazyDevice(), []
    monkeypatch.setattr(cuda, "fastest_way", lambda *_: timed.append(1) or ONE_THREAD)
    one_kind = cuda_kind(device)
    with one_kind.held(few[1]):
        for policy in ("lru", "oled"):
            run(few, policy, 20, kind=one_kind)
            assert device.pinned == [few[1].block.ctypes.data]
    assert device.pinned == []
    assert timed == [1]


def alive():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("oled-")]


def test_too_many_slots_are_refused_before_anything_is_pinned(few):
    device = LazyDevice(memory=2**20)
    with pytest.raises(UserError, match=r"slots need .* of device memory, 1\.0 MiB are free"):
        live(few, "lru", 100, device)
    assert device.pinned == []
    assert alive() == []


def test_memory_that_ends_while_it_is_taken_is_one_line_and_given_back(few, monkeypatch):
    device = LazyDevice(memory=2**20)
    monkeypatch.setattr(device, "free_bytes", lambda: 2**40)  # somebody else was faster
    with pytest.raises(UserError, match=r"no memory left: CUDA out of memory.*fewer cache") as told:
        live(few, "lru", 100, device)
    assert "\n" not in str(told.value)
    assert device.pinned == []
    assert alive() == []


def test_memory_that_can_not_be_pinned_is_one_line_and_given_back(few):
    with pytest.raises(UserError, match="can not be pinned"):
        live(few, "lru", 20, LazyDevice(pinnable=2**20))
    assert alive() == []


@pytest.mark.parametrize("lane", ["group", "copy", "compute_on_host"])
def test_a_lane_that_fails_ends_the_run_and_unpins(few, monkeypatch, lane):
    def fail(self, *_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    monkeypatch.setattr(Cuda, lane, fail)
    device = LazyDevice()
    with pytest.raises(LaneError, match=r"lane failed: OutOfMemoryError\('CUDA out of memory"):
        live(few, "oled", 20, device)
    assert device.pinned == []
    assert alive() == []


def test_pairs_of_unused_slots_add_nothing():
    """A batch's pads: their rows of the output are zero, whatever lay in the room before."""
    ready = demo(forwards=2)
    routing, store, costs = ready
    ids = [i.copy() for i in routing.ids]
    for rows in ids:
        rows[-2:] = 65535
    import dataclasses

    steps = routing.steps
    padded = dataclasses.replace(routing, ids=tuple(ids))
    kept = [np.unique(i[i < 128]) for i in ids]
    counts = [np.unique(i[i < 128], return_counts=True)[1] for i in ids]
    steps = dataclasses.replace(
        steps,
        offsets=np.cumsum([0, *map(len, kept)]),
        expert=np.concatenate(kept).astype(np.uint16),
        count=np.concatenate(counts).astype(np.int32),
        mass=np.ones((sum(map(len, kept)), 4), np.float32),
        last_token=np.arange(sum(map(len, kept)), dtype=np.int32),
    )
    ready = (dataclasses.replace(padded, steps=steps), store, costs)
    for device in (LazyDevice(), LazyDevice(GREEDY[3])):
        done = live(ready, "lru", 20, device)
        assert all((out[-2:] == 0).all() for out in done.outputs.steps)
        assert done.outputs.error(run(ready, "lru", 20).outputs) < ROUNDING


def test_outputs_compare_by_bits_and_by_size():
    a = Outputs([np.array([[1.0, -2.0]], np.float32), np.zeros((0, 2), np.float32)])
    same = Outputs([np.array([[1.0, -2.0]], np.float32), np.zeros((0, 2), np.float32)])
    other = Outputs([np.array([[1.0, -2.5]], np.float32), np.zeros((0, 2), np.float32)])
    nan = Outputs([np.array([[1.0, np.nan]], np.float32), np.zeros((0, 2), np.float32)])
    assert a == same
    assert a != other
    assert a.error(same) == 0
    assert other.error(a) == 0.25
    assert nan.error(a) == float("inf")
    assert a != Outputs([])
