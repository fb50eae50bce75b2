"""Four layer-steps worked out by hand, and what happens when things end at one instant."""

from __future__ import annotations

import pytest

from oled.sim import lanes as ln
from oled.sim import tally as r
from oled.sim.timeline import Timeline

from .build import (
    Ask,
    Asks,
    Forward,
    Machine,
    OnCpu,
    compose,
    entries,
    make_steps,
    replay,
    state_of,
)

MACHINE = Machine(
    head=8,
    dense=10,
    policy=6,
    group_t0=40,  # a group of n experts: 40 + 2 n
    group_per_expert=2,
    cpu_call=4,  # a batch of CPU experts: 4 + sum of (20 + tokens)
    cpu_expert=20,
    cpu_per_token=1,
    act_out=3,
    act_back=2,
    copy=30,  # 37 where the link stood still
    copy_wake=7,
    cpu_contention_ppm=500_000,
    link_contention_ppm=500_000,  # link and CPU run at half speed while both run
)

# Two layers of six experts; one resident slot each, which holds expert 0 at the start; three
# staging slots, so that at most two prefetches wait or are on their way.
FORWARDS = [
    Forward({0: {1: 1, 2: 1, 3: 1, 4: 1, 0: 1}, 1: {3: 1, 1: 1}}, tokens=5),
    Forward({0: {0: 1, 1: 1, 5: 1}, 1: {1: 1, 2: 30}}, tokens=30),
]
ASKED = {0: [Ask(1, 3, due=1), Ask(1, 5, due=1), Ask(0, 5, due=2)]}  # "A", "W", "B"
ON_CPU = frozenset({(0, 4), (2, 1), (3, 2)})  # (layer-step, expert)

# Layer-step 0 (forward 0, layer 0). Dense 0-10. The policy takes 10-16 and then asks for A, W, B.
#   16: hit {0}, 42 ns: 16-58. Copy of 1, on a link that stood still: 37 ns of work. Expert 4's
#   activations leave 16-19, then the CPU has 4+20+1 = 25 ns of work and the copy 37-3 = 34. Both
#   at half speed: the CPU is done after 50 ns, at 69 (results back 71); the copy has 34-25 = 9
#   left and lands at 78.
#   LRU: 0 was mentioned last and stays, so 1, 2 and 3 are used once and discarded. Free slots:
#   three of staging, one for each copy.
#   78: group {1} 78-120. Copy of 2, the link did not rest: 78-108. Copy of 3: 108-138.
#   120: group {2} 120-162; the slot of 1 is free. 138: all copies on demand have crossed, prefetch
#   A takes it: 138-168. 162: group {3} 162-204, the slot of 2 is free. 168: W takes it: 168-198. B
#   has no room beside A and W. The end: 204. The GPU stood still 58-78, for copies: 20.
# Layer-step 1 (layer 1). Dense 204-214. A has landed: a hit, useful. Expert 1 is missing.
#   LRU: 1, mentioned last, takes the slot of 0; A does not stay. Policy 214-220.
#   220: hit {3} 220-262. Copy of 1 after a rest: 220-257. B still has no room.
#   262: group {1} 262-304. The end: A leaves staging, W was not asked for: wasted.
# Head 304-312. B begins at 304, after a rest: 37 ns, to 341.
# Layer-step 2 (forward 1, layer 0). Dense 312-322. B (expert 5) is on its way: late. Policy to
#   328.
#   328: hit {0} 328-370. Expert 1's activations 328-331, then 25 ns on the CPU beside B's last
#   341-331 = 10: B lands after 20, at 351; the CPU has 25-10 = 15 left and is done at 366 (368).
#   370: group {5} 370-412. The end.
# Layer-step 3 (layer 1). Dense 412-422. Policy 422-428. Hit {1}, resident since step 1: 428-470.
#   Expert 2 has 30 tokens: out 428-431, 4+20+30 = 54 on the CPU: 431-485, back 487. The GPU waits
#   470-487 for the CPU: 17.
# Head 487-495.
EXPECTED = [
    (ln.LOG_DENSE, 0, 10, 0, 0, 5),
    (ln.LOG_POLICY, 10, 16, 0, 0, 0),
    (ln.LOG_HITS, 16, 58, 0, 0, 1),
    (ln.LOG_OUT, 16, 19, 0, 0, 1),
    (ln.LOG_CPU, 19, 69, 0, 0, 1),
    (ln.LOG_COPY, 16, 78, 0, 0, 1),
    (ln.LOG_COPY, 78, 108, 0, 0, 2),
    (ln.LOG_LANDED, 78, 120, 0, 0, 1),
    (ln.LOG_COPY, 108, 138, 0, 0, 3),
    (ln.LOG_LANDED, 120, 162, 0, 0, 1),
    (ln.LOG_PREFETCH, 138, 168, 0, 1, 3),
    (ln.LOG_LANDED, 162, 204, 0, 0, 1),
    (ln.LOG_PREFETCH, 168, 198, 0, 1, 5),
    (ln.LOG_DENSE, 204, 214, 0, 1, 5),
    (ln.LOG_POLICY, 214, 220, 0, 1, 0),
    (ln.LOG_HITS, 220, 262, 0, 1, 1),
    (ln.LOG_COPY, 220, 257, 0, 1, 1),
    (ln.LOG_LANDED, 262, 304, 0, 1, 1),
    (ln.LOG_HEAD, 304, 312, 0, -1, 0),
    (ln.LOG_PREFETCH, 304, 351, 1, 0, 5),
    (ln.LOG_DENSE, 312, 322, 1, 0, 30),
    (ln.LOG_POLICY, 322, 328, 1, 0, 0),
    (ln.LOG_HITS, 328, 370, 1, 0, 1),
    (ln.LOG_OUT, 328, 331, 1, 0, 1),
    (ln.LOG_CPU, 331, 366, 1, 0, 1),
    (ln.LOG_LANDED, 370, 412, 1, 0, 1),
    (ln.LOG_DENSE, 412, 422, 1, 1, 30),
    (ln.LOG_POLICY, 422, 428, 1, 1, 0),
    (ln.LOG_HITS, 428, 470, 1, 1, 1),
    (ln.LOG_OUT, 428, 431, 1, 1, 30),
    (ln.LOG_CPU, 431, 485, 1, 1, 1),
    (ln.LOG_HEAD, 487, 495, 1, -1, 0),
]


@pytest.fixture(scope="module")
def outcome():
    steps = make_steps(FORWARDS, [6, 6])
    policy = compose(initial="first", dispatch=OnCpu(ON_CPU), prefetch=Asks(ASKED))
    return replay(steps, policy, MACHINE, slots=1, staging=3)


def test_every_begin_and_end(outcome):
    assert sorted(entries(outcome), key=lambda row: (row[1], row[2], row[0])) == sorted(
        EXPECTED, key=lambda row: (row[1], row[2], row[0])
    )
    assert outcome.tally.begin_ns.tolist() == [0, 312]
    assert outcome.tally.end_ns.tolist() == [312, 495]


def test_what_was_counted(outcome):
    sums = outcome.tally.by_phase.sum(axis=(0, 1))
    expected = {
        r.ACCESSES: 5 + 2 + 3 + 2,
        r.HITS: 1 + 1 + 1 + 1,
        r.TRANSFERS: 3 + 1,
        r.CPU_MISSES: 1 + 1 + 1,
        r.LATE_MISSES: 1,
        r.MOVED_BYTES: 7 * 100,
        r.USEFUL_BYTES: 100,
        r.WASTED_BYTES: 100,
        r.LATE_BYTES: 100,
        r.STALL_COPY: 20,
        r.STALL_CPU: 17,
        r.STALL_POLICY: 4 * 6,
        r.BUSY_GPU: 4 * 10 + 2 * 8 + 9 * 42,
        r.BUSY_H2D: 62 + 30 + 30 + 30 + 30 + 37 + 47,
        r.BUSY_CPU: 50 + 35 + 54,
        r.BUSY_D2H: 3 * 3,
        r.TIME: 495,
    }
    assert {column: int(sums[column]) for column in expected} == expected


def test_counters_of_the_timeline(outcome):
    """Residents of the layer and prefetches that wait, at the end of every layer-step."""
    rows = entries(outcome, but=())
    residents = [(row[1], row[4], row[5]) for row in rows if row[0] == ln.LOG_RESIDENTS]
    assert residents == [(204, 0, 1), (304, 1, 1), (412, 0, 1), (487, 1, 1)]
    assert [row[5] for row in rows if row[0] == ln.LOG_QUEUE] == [1, 1, 0, 0]


def test_arrows_lead_from_prefetches_to_their_use(outcome):
    """A landed at 168 and computes with the hits of step 1, at 220; B landed late, at 351, and
    is in the group of 370. W was fetched in vain: no arrow.
    """
    timeline = Timeline.of(outcome.lanes, (0, 1), "test")
    arrows = [e for e in timeline.events() if e["ph"] in "sf"]
    assert [(e["ph"], e["name"], round(1000 * e["ts"])) for e in arrows] == [
        ("s", "prefetch E3", 168),
        ("f", "prefetch E3", 220),
        ("s", "prefetch E5", 351),
        ("f", "prefetch E5", 370),
    ]


# ---- what ends at one instant

PLAIN = Machine(group_t0=5, group_per_expert=5, copy=10, copy_wake=0)


def of(outcome, *kinds):
    return [row[:3] + row[4:] for row in entries(outcome) if row[0] in kinds]


def test_an_expert_that_lands_as_the_gpu_falls_idle_belongs_to_the_next_group():
    """Hit {0}: 10-20. Copies of 1 and 2 land at 20 and 30, each as the group before it ends: at 20
    the GPU takes {1}, at 30 {2}.
    """
    steps = make_steps([Forward({0: {0: 1, 1: 1, 2: 1}})], [3])
    outcome = replay(steps, compose(initial="first"), PLAIN, slots=1, staging=3)
    assert of(outcome, ln.LOG_HITS, ln.LOG_LANDED) == [
        (ln.LOG_HITS, 10, 20, 0, 1),
        (ln.LOG_LANDED, 20, 30, 0, 1),
        (ln.LOG_LANDED, 30, 40, 0, 1),
    ]


def test_what_lands_up_to_that_instant_forms_one_group():
    """Hit {0}: 10-30 (t0 15). Copies land at 20 and 30: at 30 the GPU takes both at once."""
    steps = make_steps([Forward({0: {0: 1, 1: 1, 2: 1}})], [3])
    machine = Machine(group_t0=15, group_per_expert=5, copy=10, copy_wake=0)
    outcome = replay(steps, compose(initial="first"), machine, slots=1, staging=3)
    assert of(outcome, ln.LOG_LANDED) == [(ln.LOG_LANDED, 30, 55, 0, 2)]


def test_a_slot_that_falls_free_as_a_copy_lands_serves_the_next_copy_at_once():
    """Two slots. Copies 10-20, 20-30; the group of the first, 20-30, frees its slot as the second
    lands, and the third copy begins there.
    """
    steps = make_steps([Forward({0: {0: 1, 1: 1, 2: 1}})], [3])
    outcome = replay(steps, compose(), PLAIN, slots=0, staging=2)
    assert of(outcome, ln.LOG_COPY) == [
        (ln.LOG_COPY, 10, 20, 0, 0),
        (ln.LOG_COPY, 20, 30, 0, 1),
        (ln.LOG_COPY, 30, 40, 0, 2),
    ]


def test_copies_on_demand_begin_before_prefetches_at_one_instant():
    """The prefetch of expert 1 (layer 1) lands at 40 as layer 1's routing becomes known; the one of
    expert 2 waits, though the link is idle: the routing asks for expert 3, which goes first.

    Layer 0: dense 0-10, copy 10-20, group 20-30; prefetch 20-30 is the first, due later.
    """
    machine = Machine(group_t0=5, group_per_expert=5, copy=10, copy_wake=0)
    steps = make_steps([Forward({0: {0: 1}, 1: {1: 1, 3: 1}})], [4, 4])
    asks = {0: [Ask(1, 0, due=9), Ask(1, 1, due=1), Ask(1, 2, due=9)]}
    outcome = replay(steps, compose(prefetch=Asks(asks)), machine, slots=1, staging=8)
    assert of(outcome, ln.LOG_COPY, ln.LOG_PREFETCH) == [
        (ln.LOG_COPY, 10, 20, 0, 0),
        (ln.LOG_PREFETCH, 20, 30, 1, 0),
        (ln.LOG_PREFETCH, 30, 40, 1, 1),
        (ln.LOG_COPY, 40, 50, 1, 3),
        (ln.LOG_PREFETCH, 50, 60, 1, 2),
    ]
    landed = state_of(outcome.tally.plans).tolist()
    assert landed == [0, 2, 0]  # absent, landed, absent


@pytest.mark.parametrize("policy", [0, 1, 25])
def test_prefetches_begin_behind_the_demand_copies_decided_with_them(policy):
    """The link is idle while the policy decides, and nothing slips in before what it decides."""
    machine = Machine(group_t0=5, group_per_expert=5, copy=10, copy_wake=0, policy=policy)
    steps = make_steps([Forward({0: {0: 1, 2: 1}, 1: {1: 1}})], [4, 4])
    asks = {0: [Ask(1, 1, due=1)]}
    outcome = replay(steps, compose(prefetch=Asks(asks)), machine, slots=1, staging=8)
    decided = 10 + policy
    assert of(outcome, ln.LOG_COPY, ln.LOG_PREFETCH) == [
        (ln.LOG_COPY, decided, decided + 10, 0, 0),
        (ln.LOG_COPY, decided + 10, decided + 20, 0, 2),
        (ln.LOG_PREFETCH, decided + 20, decided + 30, 1, 1),
    ]


def test_a_prefetch_asked_for_earlier_begins_in_policy_time():
    """Layer 0 asks for two experts of layer 2. Copy 110-180, group 180-190, the first 180-250.
    Layer 1: dense to 200, policy to 300. The second begins at 250 and crosses until 320;
    the copy on demand, decided at 300, waits for it.
    """
    machine = Machine(group_t0=5, group_per_expert=5, copy=70, copy_wake=0, policy=100)
    steps = make_steps([Forward({0: {0: 1}, 1: {0: 1}, 2: {1: 1, 2: 1}})], [4, 4, 4])
    asks = {0: [Ask(2, 1, due=2), Ask(2, 2, due=2)]}
    outcome = replay(steps, compose(prefetch=Asks(asks)), machine, slots=1, staging=8)
    assert of(outcome, ln.LOG_COPY, ln.LOG_PREFETCH) == [
        (ln.LOG_COPY, 110, 180, 0, 0),
        (ln.LOG_PREFETCH, 180, 250, 2, 1),
        (ln.LOG_PREFETCH, 250, 320, 2, 2),
        (ln.LOG_COPY, 320, 390, 1, 0),
    ]


def test_a_prefetch_in_flight_is_not_stopped():
    """Copy 11-41, group 41-51, prefetch 41-71. Layer 1 has decided at 62; its copy waits."""
    machine = Machine(group_t0=5, group_per_expert=5, copy=30, copy_wake=0, policy=1)
    steps = make_steps([Forward({0: {0: 1}, 1: {0: 1}, 2: {1: 1}})], [4, 4, 4])
    asks = {0: [Ask(2, 1, due=2)]}
    outcome = replay(steps, compose(prefetch=Asks(asks)), machine, slots=1, staging=8)
    assert of(outcome, ln.LOG_COPY, ln.LOG_PREFETCH) == [
        (ln.LOG_COPY, 11, 41, 0, 0),
        (ln.LOG_PREFETCH, 41, 71, 2, 1),
        (ln.LOG_COPY, 71, 101, 1, 0),
    ]


def test_copies_on_demand_pass_between_two_pieces_of_a_prefetch():
    """Three pieces of 10, 10 and 11 ns: 31 ns as one copy. Layer 0: copy 11-42, group 42-44.
    Layer 1 has decided at 55; its copy begins when the second piece has crossed.
    """
    machine = Machine(group_t0=1, group_per_expert=1, copy=31, copy_wake=0, policy=1)
    steps = make_steps([Forward({0: {0: 1}, 1: {0: 1}, 2: {1: 1}})], [4, 4, 4])
    asks = {0: [Ask(2, 1, due=2, chunks=3)]}
    outcome = replay(steps, compose(prefetch=Asks(asks)), machine, slots=1, staging=8)
    assert of(outcome, ln.LOG_COPY, ln.LOG_PREFETCH) == [
        (ln.LOG_COPY, 11, 42, 0, 0),
        (ln.LOG_PREFETCH, 42, 52, 2, 1),
        (ln.LOG_PREFETCH, 52, 62, 2, 1),
        (ln.LOG_COPY, 62, 93, 1, 0),
        (ln.LOG_PREFETCH, 93, 104, 2, 1),
    ]


@pytest.mark.parametrize("cpu_expert", [13, 14, 15])
def test_cpu_and_link_end_one_nanosecond_apart_or_together(cpu_expert):
    """The copy lands at 24, the CPU is done at 23, 24 or 25: no order of the two changes the group
    of the landed expert, 24-34, or the end of the layer.
    """
    machine = Machine(
        group_t0=5,
        group_per_expert=5,
        copy=14,
        copy_wake=0,
        cpu_call=0,
        cpu_expert=cpu_expert,
        cpu_per_token=0,
        act_out=0,
        act_back=0,
    )
    steps = make_steps([Forward({0: {0: 1, 1: 1}})], [2])
    policy = compose(dispatch=OnCpu(frozenset({(0, 1)})))
    outcome = replay(steps, policy, machine, slots=1)
    assert of(outcome, ln.LOG_LANDED, ln.LOG_CPU) in (
        [(ln.LOG_LANDED, 24, 34, 0, 1), (ln.LOG_CPU, 10, 10 + cpu_expert, 0, 1)],
        [(ln.LOG_CPU, 10, 10 + cpu_expert, 0, 1), (ln.LOG_LANDED, 24, 34, 0, 1)],
    )
    assert outcome.tally.end_ns.tolist() == [34]


@pytest.mark.parametrize(
    ("cpu_ppm", "link_ppm", "copy_end", "cpu_end"),
    [
        (1_000_000, 1_000_000, 30, 30),
        (500_000, 1_000_000, 30, 40),  # the copy is done first: 10 of 20 ns of work are left
        (1_000_000, 500_000, 40, 30),
        (800_000, 250_000, 49, 35),  # the CPU after 25 ns; 6.25 of the copy's 20 ns are done
    ],
)
def test_link_and_cpu_each_have_their_rate_until_the_first_ends(
    cpu_ppm, link_ppm, copy_end, cpu_end
):
    """Dense 0-10, then 20 ns of work each from 10 on."""
    machine = Machine(
        group_t0=5, group_per_expert=5, copy=20, copy_wake=0, cpu_call=0, cpu_expert=20,
        cpu_per_token=0, act_out=0, act_back=0, cpu_contention_ppm=cpu_ppm,
        link_contention_ppm=link_ppm,
    )  # fmt: skip
    steps = make_steps([Forward({0: {0: 1, 1: 1}})], [2])
    outcome = replay(steps, compose(dispatch=OnCpu(frozenset({(0, 1)}))), machine, slots=1)
    assert sorted(of(outcome, ln.LOG_COPY, ln.LOG_CPU)) == sorted(
        [(ln.LOG_COPY, 10, copy_end, 0, 0), (ln.LOG_CPU, 10, cpu_end, 0, 1)]
    )


def test_a_timeline_of_very_many_pieces_is_complete():
    steps = make_steps([Forward({0: {0: 1}, 1: {1: 1}})], [2, 2])
    machine = Machine(dense=4000, copy=3000, copy_wake=0)
    policy = compose(prefetch=Asks({0: [Ask(1, 1, due=1, chunks=3000)]}))
    pieces = of(replay(steps, policy, machine, slots=1), ln.LOG_PREFETCH)
    assert len(pieces) == 3000
    assert sum(end - begin for _, begin, end, *_ in pieces) == 3000
