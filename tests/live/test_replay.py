"""A trace's routing run live: the resident run's outputs and the simulator's decisions."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time

import numpy as np
import pytest

from oled.errors import UserError
from oled.live.backends import LaneError
from oled.live.backends import lane_threads as module
from oled.live.backends.emulated import Emulated
from oled.live.slots import SlotPool
from oled.policies.part import Retention
from oled.sim.prepared import PreparedTrace
from tests.live.build import RESIDENT, demo, run, same_decisions

POLICIES = (
    "naive_lru", "lru", "lfu", "inter_iteration", "least_stale", "in_cache_lfu", "windowed",
    "expert_count", "gate_sum", "state_gate", "two_timescale", "oled_priority", "oled_layeradapt",
    "oled_marginal", "oled", "oled_exact", "front_loaded", "llama_cpp_cache",
)  # fmt: skip
WITHOUT_STAGING = ("cpu_all",)


def lanes_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("oled-")]


@pytest.mark.parametrize("policy", [*POLICIES, "tide", *WITHOUT_STAGING])
@pytest.mark.parametrize("slots", [0, 20])
def test_outputs_are_the_resident_runs_and_decisions_the_simulators(ready, resident, policy, slots):
    live = run(ready, policy, slots)
    assert live.outputs == resident
    assert same_decisions(live, ready, policy, slots)


@pytest.mark.parametrize("policy", ["naive_lru", "lru", "oled", "tide"])
def test_from_the_minimum_cache_up(ready, resident, policy):
    for slots, staging in ((0, 1), (1, 1), (2, 3), (128, 1)):
        live = run(ready, policy, slots, staging=staging)
        assert live.outputs == resident
        assert same_decisions(live, ready, policy, slots, staging=staging)


def test_no_staging_where_nothing_is_copied(ready, resident):
    assert run(ready, "cpu_all", 3, staging=0).outputs == resident
    with pytest.raises(UserError, match="at least 1 staging slot"):
        run(ready, "lru", 3, staging=0)


@pytest.mark.parametrize("policy", ["lru", "oled_priority"])
def test_one_pool_for_all_layers(ready, resident, policy):
    live = run(ready, policy, 0.1, scope="global")
    assert live.outputs == resident
    assert same_decisions(live, ready, policy, 0.1, scope="global")


def test_across_requests_afresh_and_persistent():
    ready = demo(first=44, forwards=20)
    assert len(set(ready[0].steps.request.tolist())) == 2
    resident = run(ready, RESIDENT, 128).outputs
    for lifecycle in ("request", "persistent"):
        live = run(ready, "oled", 20, lifecycle=lifecycle)
        assert live.outputs == resident
        assert same_decisions(live, ready, "oled", 20, lifecycle=lifecycle)


def test_requests_in_lockstep():
    """Three requests as one batch: tokens follow each other, decisions are the simulator's."""
    ready = demo(first=3, forwards=8, rows=3)
    steps = ready[0].steps
    alone = PreparedTrace.of("demo").steps
    assert steps.tokens[2] > alone.tokens[alone.phase > 0].max()
    for index, (ids, weights) in enumerate(zip(ready[0].ids, ready[0].weights, strict=True)):
        lo, hi = steps.offsets[index], steps.offsets[index + 1]
        expert, count = np.unique(ids, return_counts=True)
        np.testing.assert_array_equal(expert, steps.expert[lo:hi])
        np.testing.assert_array_equal(count, steps.count[lo:hi])
        assert len(ids) == len(weights) == steps.tokens[steps.forward[index]]
    resident = run(ready, RESIDENT, 128).outputs
    for policy in ("oled", "naive_lru"):
        live = run(ready, policy, 20)
        assert live.outputs == resident
        assert same_decisions(live, ready, policy, 20)


def test_a_part_in_plain_python_is_executed_too(ready, resident):
    class Oldest(Retention):
        def observe(self, step, cache, memory, params):
            pass

    import dataclasses

    from oled.policies.composition import load_composition

    policy = dataclasses.replace(load_composition("lru"), retention=Oldest())
    assert run(ready, policy, 20).outputs == resident


def test_paced_lanes_change_neither_outputs_nor_decisions(ready, resident):
    live = run(ready, "oled", 20, paced=True)
    assert live.outputs == resident
    assert same_decisions(live, ready, "oled", 20)
    assert (np.diff(live.end_ns) > 0).all()
    assert (live.begin_ns[1:] == live.end_ns[:-1]).all()


def test_no_job_begins_before_its_cause(ready):
    """Copies of a lane do not overlap; a group of landed experts begins after they landed."""
    from oled.sim.lanes import LOG_COPY, LOG_HITS, LOG_LANDED

    rows = run(ready, "lru", 20, paced=True).entries
    copies = rows[rows[:, 0] == LOG_COPY]
    groups = rows[(rows[:, 0] == LOG_HITS) | (rows[:, 0] == LOG_LANDED)]
    assert (copies[1:, 1] >= copies[:-1, 1]).all()
    assert (groups[:, 2] >= groups[:, 1]).all()
    for forward, layer in {(f, n) for f, n in groups[:, 3:5].tolist()}:
        mine = (copies[:, 3] == forward) & (copies[:, 4] == layer)
        landed = groups[
            (groups[:, 0] == LOG_LANDED) & (groups[:, 3] == forward) & (groups[:, 4] == layer)
        ]
        assert landed[:, 5].sum() == mine.sum()
        if mine.any():
            assert landed[:, 1].min() >= copies[mine, 2].min()
            assert landed[:, 1].max() >= copies[mine, 2].max()


def test_without_the_landing_event_the_outputs_are_wrong(ready, resident, monkeypatch):
    """The consumer does not wait: the poisoned element makes it show, every time."""
    copy_all = Emulated._copy_all

    def announce_first(self, work):
        for position in work.transfers:
            slot = work.free[0] if work.free else work.released[0]
            work.slot[position] = slot
            self._device[slot, 0] = np.nan
            work.landed.put((work.begin, position))
        time.sleep(0.002)
        work.landed = module.SimpleQueue()  # what really lands is not listened to
        return copy_all(self, work)

    monkeypatch.setattr(Emulated, "_copy_all", announce_first)
    assert run(ready, "lru", 20).outputs != resident


def test_without_the_slot_event_the_outputs_are_wrong(ready, resident, monkeypatch):
    """Copies that do not wait for the compute in their slot overwrite it."""
    group = Emulated.group

    def slow(self, work, chosen, turn, *, hits):
        for slot in work.released:
            work.vacant.put((work.begin, slot))
        time.sleep(0.002)
        return group(self, work, chosen, turn, hits=hits)

    monkeypatch.setattr(Emulated, "group", slow)
    assert run(ready, "oled_priority", 20, staging=1).outputs != resident


@pytest.mark.parametrize("lane", ["group", "copy", "compute_on_host"])
def test_a_lane_that_fails_ends_the_run_and_leaves_nothing(ready, monkeypatch, lane):
    def fail(self, *_, **__):
        raise MemoryError("no more")

    monkeypatch.setattr(Emulated, lane, fail)
    switch = sys.getswitchinterval()
    with pytest.raises(LaneError, match="no more"):
        run(ready, "oled", 20, paced=True)
    assert lanes_alive() == []
    assert sys.getswitchinterval() == switch
    assert gc.isenabled()


def test_ctrl_c_ends_the_run_and_leaves_nothing(ready, monkeypatch):
    held = threading.Event()

    def never(self, work):
        held.set()
        work.landed.get()  # as a lane that waits for another one does
        raise module.StoppedError

    monkeypatch.setattr(Emulated, "_compute", never)
    monkeypatch.setattr(Emulated, "_copy_all", lambda self, work: work.begin)
    main = threading.main_thread().ident

    def interrupt():
        held.wait(20)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(ready, "lru", 20)
    thread.join()
    assert lanes_alive() == []


def test_a_silent_lane_is_told(ready, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    monkeypatch.setattr(Emulated, "_copy_all", lambda self, work: work.vacant.get() and 0)
    with pytest.raises(LaneError, match="no lane has answered"):
        run(ready, "lru", 20)
    assert lanes_alive() == []


@pytest.mark.parametrize(
    ("policy", "fields", "message"),
    [
        ("lru", {"staging": "unbounded"}, "accounting replay"),
    ],
)
def test_what_cannot_run_live_is_refused_by_name(ready, policy, fields, message):
    with pytest.raises(UserError, match=message):
        run(ready, policy, 20, **fields)


def test_the_slot_pool_refuses_what_cannot_be():
    pool = SlotPool(2, 1, 4)
    first, second = pool.take(2)
    assert {first, second} == {0, 1}
    with pytest.raises(RuntimeError, match="1 slots were granted, 0 are free"):
        pool.take(1)
    pool.commit(0, 3, first)
    with pytest.raises(RuntimeError, match="expert 1 of layer 0"):
        pool.evict(0, 1)
    assert pool.evict(0, 3) == first
    pool.give_back([first])
    assert pool.take(1) == [first]
