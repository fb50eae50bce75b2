"""The validation itself is validated: simulators that are wrong on purpose must be caught.

The live side is the right simulator with a little noise, so these tests keep no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from oled.hardware import CostTables, build_costs, load_profile, load_runtime
from oled.live.planlog import PlanLog, first_difference
from oled.live.routing import cut
from oled.models.catalogue import model_geometry
from oled.policies.composition import Composition, load_composition
from oled.sim.prepare import Replay, replay_steps
from oled.sim.prepared import PreparedTrace
from oled.sim.settings import Settings
from oled.sim.slots import parse_slots
from oled.validate.judge import DISTURBED_NS, Pair, judge, ranking, row
from oled.validate.pace import Pace
from oled.validate.pairs import work_ns

CONFIGURATIONS = [
    ("naive_lru", 20),
    ("lru", 20),
    ("lru", 50),
    ("oled", 50),
    ("tide", 20),
    ("oled", 20),
]
PROFILE = load_profile("rtx5090_xeon8470q")
REPEATS = 3


@pytest.fixture(scope="module")
def steps():
    return cut(PreparedTrace.of("demo").steps, 0, 24)


@pytest.fixture(scope="module")
def costs(steps):
    trace = PreparedTrace.of("demo")
    found = Pace(3.0).of(
        build_costs(
            trace.geometry,
            steps.tokens,
            steps.context,
            int(steps.tokens.max()),
            PROFILE,
            load_runtime("emulated"),
            model_geometry("llada2_mini"),
        )
    )
    return dataclasses.replace(found, cpu_contention_ppm=850_000, link_contention_ppm=850_000)


def simulated(steps, costs: CostTables, composition: Composition, slots: int) -> Replay:
    settings = Settings(slots=slots, plans=True, timeline=(0, steps.num_forwards))
    budget = parse_slots(slots, "layer", steps.num_experts, costs.expert_bytes)
    return replay_steps(steps, costs, composition, budget, settings)


def times(replay: Replay):
    return replay.tally.end_ns - replay.tally.begin_ns


def work(replay: Replay, forwards: int):
    return work_ns(replay.lanes.log[: replay.lanes.entries], forwards)


@pytest.fixture(scope="module")
def right(steps, costs):
    return {
        (policy, slots): simulated(steps, costs, load_composition(policy), slots)
        for policy, slots in CONFIGURATIONS
    }


def pair_of(live: Replay, other: Replay, policy: str, slots: int, steps, **fields) -> Pair:
    """`live` with noise of 0.2 %, beside what `other` predicts."""
    rng = np.random.default_rng(0)
    shape = (REPEATS, steps.num_forwards)
    measured = (times(live) * (1 + 0.002 * np.abs(rng.standard_normal(shape)))).astype(np.int64)
    logs = [PlanLog(r.tally.plans, r.tally.orders) for r in (live, other)]
    pair = Pair(
        policy=policy,
        slots=slots,
        live_ns=measured,
        late_ns=np.full(shape, 20_000),
        live_work_ns=np.stack([work(live, steps.num_forwards)] * REPEATS),
        simulated_ns=times(other),
        simulated_work_ns=work(other, steps.num_forwards),
        first_difference=first_difference(*logs, steps),
        decided_alike=1.0,
        outputs_identical=True,
        decide_ns=1e6,
    )
    return dataclasses.replace(pair, **fields)


def report_of(right, steps, predict: Callable[[str, int], Replay]) -> dict:
    return judge(
        [
            row(pair_of(live, predict(policy, slots), policy, slots, steps), steps)
            for (policy, slots), live in right.items()
        ]
    )


def test_the_right_simulator_passes(right, steps):
    report = report_of(right, steps, lambda policy, slots: right[policy, slots])
    assert report["verdict"] == "pass"
    assert report["reasons"] == []
    assert report["decisions_identical"]
    assert report["tpot_error_max_abs"] < 0.005
    assert report["ranking_spearman"] == pytest.approx(1.0)
    assert report["ranking_worst_swap"] == 0.0


def _change(costs: CostTables, **factors: float) -> CostTables:
    return dataclasses.replace(
        costs,
        **{
            name: (getattr(costs, name) * factor).astype(np.int64)
            if isinstance(getattr(costs, name), np.ndarray)
            else round(getattr(costs, name) * factor)
            for name, factor in factors.items()
        },
    )


def _no_queue(costs: CostTables) -> CostTables:
    """Copies all cross at once: only the first of a step takes time."""
    return dataclasses.replace(
        costs, copy_ns=np.ones_like(costs.copy_ns), copy_wake_ns=int(costs.copy_ns.max())
    )


def _no_launch(costs: CostTables) -> CostTables:
    """A launch group costs its experts only."""
    start = round(3 * PROFILE.moe_t0.base)
    return dataclasses.replace(costs, gpu_ns=np.maximum(costs.gpu_ns - start, 0))


def _free_landed(costs: CostTables) -> CostTables:
    """Experts that landed wait for no GPU: groups of few take no time."""
    gpu = costs.gpu_ns.copy()
    gpu[:, :, :6] = 0
    return dataclasses.replace(costs, gpu_ns=gpu)


def _late_landing(costs: CostTables) -> CostTables:
    return dataclasses.replace(costs, copy_wake_ns=costs.copy_wake_ns + int(costs.copy_ns.max()))


WRONG: dict[str, Callable[[CostTables], CostTables]] = {
    "bandwidth + 5 %": lambda costs: _change(costs, copy_ns=1 / 1.05),
    "CPU table + 10 %": lambda costs: _change(costs, cpu_ns=1.1),
    "GPU table + 10 %": lambda costs: _change(costs, gpu_ns=1.1),
    "no queue on the link": _no_queue,
    "no copy latency": lambda costs: _change(costs, copy_wake_ns=0.0),
    "no launch cost": _no_launch,
    "landed experts compute for free": _free_landed,
    "late landing": _late_landing,
    "no dense part": lambda costs: _change(costs, dense_ns=0.0),
    "no policy time": lambda costs: _change(costs, policy_ns=0.0),
    "activations cross in no time": lambda costs: _change(costs, act_out_ns=0.0, act_back_ns=0.0),
    "no CPU call": lambda costs: _change(costs, cpu_call_ns=0.0),
    "no contention": lambda costs: dataclasses.replace(
        costs, cpu_contention_ppm=1_000_000, link_contention_ppm=1_000_000
    ),
    "contention of copies twice": lambda costs: dataclasses.replace(
        costs, cpu_contention_ppm=700_000, link_contention_ppm=700_000
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_simulator_is_caught(right, steps, costs, name):
    wrong = WRONG[name](costs)
    report = report_of(
        right,
        steps,
        lambda policy, slots: simulated(steps, wrong, load_composition(policy), slots),
    )
    assert report["verdict"] == "fail", report
    assert report["reasons"]


def test_serial_lanes_are_caught(right, steps, costs):
    def serial(policy: str, slots: int) -> Replay:
        composition = dataclasses.replace(load_composition(policy), overlap=False)
        return simulated(steps, costs, composition, slots)

    report = report_of(right, steps, serial)
    assert report["verdict"] == "fail"
    assert report["tpot_error_max_abs"] > 0.1


def test_the_reversed_order_is_caught_by_the_decisions(right, steps):
    def reverse(policy: str, slots: int) -> Replay:
        replay = right[policy, slots]
        orders = replay.tally.orders.copy()
        for lo, hi in zip(steps.offsets[:-1], steps.offsets[1:], strict=True):
            mine = orders[lo:hi]
            mine[mine >= 0] = mine.max(initial=0) - mine[mine >= 0]
        return dataclasses.replace(replay, tally=replay.tally._replace(orders=orders))

    report = report_of(right, steps, reverse)
    assert report["verdict"] == "fail"
    assert not report["decisions_identical"]
    assert "forward 0, MoE layer 0, expert" in report["reasons"][0]
    assert report["tpot_error_max_abs"] < 0.005  # time alone would not have shown it


def test_wrong_outputs_fail(right, steps):
    live = right["lru", 20]
    pair = pair_of(live, live, "lru", 20, steps, outputs_identical=False)
    report = judge([row(pair, steps)], gated=False)
    assert report["verdict"] == "fail"
    assert "outputs are not those" in report["reasons"][0]


def test_a_busy_machine_gives_no_verdict(right, steps):
    live = right["lru", 20]
    shape = (REPEATS, steps.num_forwards)
    late = np.full(shape, 20 * DISTURBED_NS)
    pair = pair_of(live, live, "lru", 20, steps, late_ns=late)
    report = judge([row(pair, steps)])
    assert report["verdict"] == "busy"
    assert report["undisturbed_share"] == 0.0
    assert report["tpot_error_max_abs"] is None
    assert report["forward_error_p95_abs"] is None
    late[:, :20] = 0
    calm = judge([row(pair_of(live, live, "lru", 20, steps, late_ns=late), steps)])
    assert calm["verdict"] == "pass"


def test_a_disturbed_repeat_does_not_count(right, steps):
    live = right["lru", 20]
    pair = pair_of(live, live, "lru", 20, steps)
    pair.live_ns[0] *= 3
    pair.late_ns[0] = 20 * DISTURBED_NS
    assert judge([row(pair, steps)])["verdict"] == "pass"


def test_a_busy_machine_does_not_hide_a_wrong_simulator(right, steps, costs):
    """The calm configurations still speak."""
    live = right["lru", 20]
    late = np.full((REPEATS, steps.num_forwards), 20 * DISTURBED_NS)
    wrong = simulated(steps, WRONG["no queue on the link"](costs), load_composition("lru"), 50)
    rows = [
        row(pair_of(live, live, "lru", 20, steps, late_ns=late), steps),
        row(pair_of(right["lru", 50], wrong, "lru", 50, steps), steps),
    ]
    assert judge(rows)["verdict"] == "fail"


def test_ranking_names_the_worst_swap():
    def entry(live, predicted):
        return {"live_tpot_ns": live, "simulated_tpot_ns": predicted, "tpot_error": 0.0}

    spearman, swap = ranking([entry(100.0, 1.0), entry(110.0, 3.0), entry(150.0, 2.0)])
    assert spearman == pytest.approx(0.5)
    assert swap == pytest.approx(150 / 110 - 1)
    assert ranking([entry(1.0, 1.0)]) == (None, 0.0)


def test_pace_slows_everything_alike(costs):
    slow = Pace(2.0).of(costs)
    assert np.array_equal(slow.gpu_ns, 2 * costs.gpu_ns)
    assert slow.policy_ns == 2 * costs.policy_ns
    assert not Pace(1.0, kept=False).of(costs).dense_ns.any()
    with pytest.raises(ValueError, match=r"pace\.dilation is 0"):
        Pace(0.0)
