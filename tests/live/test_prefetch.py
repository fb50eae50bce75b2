"""Copies made ahead, live: the resident run's outputs, and decisions given what the link did."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from oled.hardware import build_costs, load_profile, load_runtime
from oled.live.backends import LaneError
from oled.live.backends.emulated import Emulated
from oled.live.executor import Executor
from oled.live.planlog import BEGAN, CROSSED, equal_share
from oled.live.prefetch_link import PrefetchLink
from oled.models.catalogue import model_geometry
from oled.policies.interface import IN_FLIGHT, LANDED
from oled.sim import lanes as ln
from oled.sim import tally as count
from oled.sim.prepared import PreparedTrace
from tests.live.configured import configured, policies, prefetching

STATE = 3


@pytest.fixture(scope="module")
def slow(ready):
    """The same with the times of a machine whose copies take a third of a millisecond."""
    routing, store, _ = ready
    steps, trace = routing.steps, PreparedTrace.of("demo")
    costs = build_costs(
        trace.geometry,
        steps.tokens,
        steps.context,
        int(steps.tokens.max()),
        load_profile("rtx4090_desktop"),
        load_runtime("emulated"),
        model_geometry("llada2_mini"),
    )
    return routing, store, costs


@pytest.mark.parametrize("policy", policies())
def test_every_policy_runs_live(ready, resident, policy):
    """Outputs bitwise those of the resident run, decisions the simulator's, from 1 slot up."""
    for slots, staging in ((20, 8), (1, 2)):
        one = configured(ready, policy, slots, staging=staging)
        live = one.live()
        assert live.outputs == resident
        assert one.difference(live) is None
        if policy not in prefetching():
            assert equal_share(live.plans, _plans(one.simulated()), ready[0].steps) == 1.0


@pytest.fixture
def held(monkeypatch):
    """A copy ahead crosses no sooner than the layer-step that it is for: it is late."""
    fetch = Emulated.fetch

    def wait(self, piece):
        for _ in range(200):
            running = self._threads.running
            if running is not None and running.layer == piece.layer:
                break
            time.sleep(2e-4)
        return fetch(self, piece)

    monkeypatch.setattr(Emulated, "fetch", wait)


def _plans(replay):
    from oled.live.planlog import PlanLog

    return PlanLog(replay.tally.plans, replay.tally.orders)


@pytest.mark.parametrize("policy", ["promoe", "oled_exact_fill", "prefetch_dial"])
@pytest.mark.parametrize("fields", [{"slots": 0.1, "scope": "global"}, {"slots": 0}])
def test_one_pool_for_all_layers_and_no_residents(ready, resident, policy, fields):
    one = configured(ready, policy, **fields)
    live = one.live()
    assert live.outputs == resident
    assert one.difference(live) is None


def test_paced_lanes_change_neither_outputs_nor_what_follows(slow, resident):
    one = configured(slow, "promoe", 20)
    live = one.live(paced=True)
    assert live.outputs == resident
    assert one.difference(live) is None
    states = live.plans.plans & STATE
    assert (states == LANDED).any()
    assert (live.link[:, 1] == BEGAN).sum() >= (live.link[:, 1] == CROSSED).sum() > 0


def test_a_plan_that_the_link_does_not_explain_is_told(ready):
    one = configured(ready, "promoe", 20)
    live = one.live()
    changed = live.plans.plans.copy()
    where = int(np.flatnonzero((changed & STATE) == LANDED)[0])
    changed[where] ^= LANDED
    told = one.difference(_with(live, plans=type(live.plans)(changed, live.plans.orders)))
    assert "live plan" in str(told)
    began = np.flatnonzero(live.link[:, 1] == BEGAN)[0]
    link = live.link.copy()
    link[began, 3] ^= 1
    assert "the live link began expert" in str(one.difference(_with(live, link=link)))


def _with(live, **fields):
    import dataclasses

    return dataclasses.replace(live, **fields)


def test_demand_overtakes_what_waits_and_not_what_is_on_its_way(ready, held):
    rows = configured(ready, "promoe", 20).live().entries
    link = rows[(rows[:, 0] == ln.LOG_COPY) | (rows[:, 0] == ln.LOG_PREFETCH)]
    link = link[np.argsort(link[:, 1], kind="stable")]
    assert (link[1:, 1] >= link[:-1, 2]).all()  # one copy at a time
    demand, waited = link[:, 0] == ln.LOG_COPY, 0
    for forward, layer in {(f, n) for f, n in link[demand][:, 3:5].tolist()}:
        mine = np.flatnonzero(demand & (link[:, 3] == forward) & (link[:, 4] == layer))
        assert demand[mine[0] : mine[-1] + 1].all()  # nothing ahead slips in between
        here = (rows[:, 3] == forward) & (rows[:, 4] == layer)
        decided = rows[here & (rows[:, 0] == ln.LOG_RESIDENTS), 1].item()
        if mine[0] and not demand[mine[0] - 1]:
            waited += int(link[mine[0] - 1, 2] <= link[mine[0], 1] <= decided)
    assert waited > 10  # was on the link as the step began, and was waited for


def test_staging_keeps_a_slot_for_demand(ready, monkeypatch):
    most = []
    take = PrefetchLink.next

    def watched(self):
        piece = take(self)
        most.append(self.staged())
        return piece

    monkeypatch.setattr(PrefetchLink, "next", watched)
    configured(ready, "prefetch_dial", 20, staging=3).live()
    assert max(most) == 2


def test_a_late_prefetch_is_a_miss_counted_once(ready, resident, held, monkeypatch):
    deciders = []
    make = Executor.__init__

    def kept(self, store, slots, decider, backend):
        deciders.append(decider)
        make(self, store, slots, decider, backend)

    monkeypatch.setattr(Executor, "__init__", kept)
    live = configured(ready, "promoe", 20).live()
    assert live.outputs == resident
    booked = deciders[0].tally.by_phase.sum(axis=(0, 1))
    late = int(booked[count.LATE_MISSES])
    assert late == ((live.plans.plans & STATE) == IN_FLIGHT).sum() > 0
    misses = booked[count.ACCESSES] - booked[count.HITS]
    assert misses == booked[count.TRANSFERS] + late + booked[count.CPU_MISSES]
    copies = live.entries[live.entries[:, 0] == ln.LOG_COPY]
    assert len(copies) == booked[count.TRANSFERS]  # a late one is not copied again


def test_who_does_not_wait_for_a_late_copy_gets_it_wrong(ready, resident, held, monkeypatch):
    begin = PrefetchLink.begin

    def impatient(self, step, work, slots):
        begin(self, step, work, slots)
        work.hits = np.sort(np.concatenate([work.hits, work.late]))
        work.late = work.late[:0]

    monkeypatch.setattr(PrefetchLink, "begin", impatient)
    assert configured(ready, "promoe", 20).live().outputs != resident


def test_a_copy_ahead_that_fails_ends_the_run(ready, monkeypatch):
    def fail(self, piece):
        raise MemoryError("no more")

    monkeypatch.setattr(Emulated, "fetch", fail)
    with pytest.raises(LaneError, match="the link lane failed: MemoryError"):
        configured(ready, "prefetch_dial", 20).live(paced=True)
    assert not [t for t in threading.enumerate() if t.name.startswith("oled-")]


def test_ctrl_c_in_a_copy_ahead_ends_the_run(ready, monkeypatch):
    import signal

    fetch, main = Emulated.fetch, threading.main_thread().ident
    begun = threading.Event()

    def slow(self, piece):
        begun.set()
        time.sleep(0.05)
        return fetch(self, piece)

    def interrupt():
        begun.wait(20)
        signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(Emulated, "fetch", slow)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        configured(ready, "prefetch_dial", 20).live(paced=True)
    thread.join()
    assert not [t for t in threading.enumerate() if t.name.startswith("oled-")]


# the simulator's own link, replayed: the decisions of its compiled loop


@pytest.mark.parametrize("policy", prefetching())
@pytest.mark.parametrize("staging", [2, 8])
def test_given_the_simulators_own_link_the_decisions_are_the_simulators(slow, policy, staging):
    """What `difference_given` compares with is what the compiled simulator decides."""
    one = configured(slow, policy, 20, staging=staging)
    replay = one.simulated()
    entries = replay.lanes.log[: replay.lanes.entries]
    live = _with(_nothing(one), plans=_plans(replay), link=_link_of(entries, slow[0].steps))
    assert one.difference(live) is None


def _nothing(one):
    """A live run without anything, to be filled."""
    from oled.live.planlog import PlanLog
    from oled.live.replay import LiveReplay

    none = np.zeros(0, np.int64)
    plans = PlanLog(np.zeros(0, np.uint8), np.zeros(0, np.int32))
    return LiveReplay(plans, none, (), none, none, none, none, 0, none)


def _link_of(entries, steps) -> np.ndarray:
    """The link log that the simulator's timeline tells, by the turns of `Decider`."""
    turns = []  # when each turn happens
    request = -1
    for forward in range(steps.num_forwards):
        mine = entries[entries[:, 3] == forward]
        dense = mine[mine[:, 0] == ln.LOG_DENSE]
        if steps.request[forward] != request:
            turns.append(dense[0, 1])
            request = steps.request[forward]
        turns.append(dense[0, 1])
        ends = mine[mine[:, 0] == ln.LOG_RESIDENTS]
        policy = mine[mine[:, 0] == ln.LOG_POLICY]
        asked = dict(zip(policy[:, 1], policy[:, 2], strict=True))  # by the time of the decision
        for (_, _, decided, *_), finished in zip(dense, ends, strict=True):
            turns += [decided, asked.get(decided, decided), finished[1]]
    link = []
    for kind, begin, end, _, layer, expert in entries.tolist():
        if kind == ln.LOG_PREFETCH:  # at one instant: it crosses, then a turn, then one begins
            link.append((begin, 2, np.searchsorted(turns, begin, "right"), BEGAN, layer, expert))
            link.append((end, 0, np.searchsorted(turns, end, "left"), CROSSED, layer, expert))
    link.sort(key=lambda event: event[:2])
    return np.array([event[2:] for event in link], np.int64).reshape(-1, 4)
