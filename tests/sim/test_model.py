"""Engine and SimPy model agree, to the nanosecond, on random small cases."""

from __future__ import annotations

import numpy as np
import pytest

from oled.policies.retention.lfu import Lfu
from oled.sim import lanes as ln
from oled.sim import tally as r
from tests.support.seeds import seeds

from .build import (
    Ask,
    Asks,
    Forward,
    Machine,
    OnCpu,
    compose,
    entries,
    make_steps,
    place_of,
    replay,
    state_of,
    stays_of,
)
from .model import Model
from .model_cache import Active, Case

KINDS = {
    "head": ln.LOG_HEAD,
    "dense": ln.LOG_DENSE,
    "hits": ln.LOG_HITS,
    "landed": ln.LOG_LANDED,
    "copy": ln.LOG_COPY,
    "prefetch": ln.LOG_PREFETCH,
    "cpu": ln.LOG_CPU,
    "out": ln.LOG_OUT,
    "policy": ln.LOG_POLICY,
}
STATES = ("absent", "resident", "landed", "in flight")
PLACES = ("gpu", "transfer", "cpu", "dropped")


def random_case(rng: np.random.Generator):
    """A few forwards over one to three layers, on a machine whose times collide often."""
    layers = int(rng.integers(1, 4))
    experts = rng.integers(2, 7, layers)
    top_k = int(rng.integers(1, 3))
    sizes = [100] * layers if rng.random() < 0.6 else rng.choice([100, 200, 400], layers).tolist()
    forwards, request = [], 0
    for number in range(int(rng.integers(2, 7))):
        request += int(number > 0 and rng.random() < 0.3)
        active = {}
        for layer in range(layers):
            if rng.random() < 0.1:
                continue
            chosen = rng.permutation(experts[layer])[: rng.integers(1, experts[layer] + 1)]
            active[layer] = {int(e): int(rng.integers(1, 3)) for e in chosen}
        forwards.append(Forward(active, request))
    steps = make_steps(forwards, experts, top_k, sizes)

    machine = Machine(
        head=int(rng.integers(0, 30)),
        dense=int(rng.integers(0, 40)),
        group_t0=int(rng.integers(1, 10)),
        group_per_token=int(rng.integers(0, 3)),
        group_per_expert=int(rng.integers(1, 20)),
        cpu_call=int(rng.integers(0, 5)),
        cpu_expert=int(rng.integers(1, 40)),
        cpu_per_token=int(rng.integers(0, 5)),
        act_out=int(rng.integers(0, 6)),
        act_back=int(rng.integers(0, 12)),
        copy=int(rng.integers(1, 40)),
        copy_wake=int(rng.integers(0, 5)),
        cpu_contention_ppm=int(rng.choice([1_000_000, 750_000, 613_337])),
        link_contention_ppm=int(rng.choice([1_000_000, 500_000, 370_001])),
        policy=int(rng.choice([0, 0, 3, 25])),
    )
    entry_step = np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))
    pairs = list(zip(entry_step.tolist(), steps.expert.tolist(), strict=True))
    sent_away = frozenset(p for p in pairs if rng.random() < 0.3)
    at_home = frozenset(p for p in pairs if rng.random() < 0.1)
    ranks = {p: float(rng.integers(0, 3)) for p in pairs}
    script: dict[int, list[Ask]] = {}
    if rng.random() < 0.75:
        for step in range(steps.num_steps):
            for _ in range(int(rng.integers(0, 4))):
                due = int(step + rng.integers(1, 2 * layers + 1))
                layer = int(rng.integers(layers))
                if due < steps.num_steps:
                    layer = int(steps.layer[due])
                kind, chunks = int(rng.random() < 0.3), int(rng.choice([1, 1, 2, 3]))
                ask = Ask(layer, int(rng.integers(experts[layer])), due, kind, chunks)
                script.setdefault(step, []).append(ask)
    anew = frozenset(s for s in range(steps.num_steps) if rng.random() < 0.2)

    pooled = bool(rng.random() < 0.3)
    everything = int((steps.num_experts * steps.expert_bytes).sum())
    slots: int | str = int(rng.integers(0, max(experts) + 1))
    if pooled:
        slots = f"{int(rng.integers(0, everything + 1))}B"
    kinds = ["demand", "compete", "frozen"]
    admission = "sequential" if not pooled and rng.random() < 0.15 else str(rng.choice(kinds))
    one_by_one = admission == "sequential"
    policy = compose(
        admission,
        dispatch=None if one_by_one else OnCpu(sent_away, ranks, at_home),
        prefetch=Asks(script, anew),
        retention=None if rng.random() < 0.6 else Lfu(),
        by_mention=one_by_one and bool(rng.random() < 0.5),
    )
    fields = {
        "slots": slots,
        "scope": "global" if pooled else "layer",
        "staging": int(rng.integers(1, 6)),
        "lifecycle": str(rng.choice(["request", "persistent"])),
    }
    return steps, machine, policy, fields


def modelled(steps, machine, policy, fields) -> Model:
    forwards: list[list[Active]] = [[] for _ in range(steps.num_forwards)]
    for s in range(steps.num_steps):
        here = slice(steps.offsets[s], steps.offsets[s + 1])
        experts = steps.expert[here].tolist()
        order = [experts[i] for i in np.argsort(steps.last_token[here])]
        f = int(steps.forward[s])
        counts = dict(zip(experts, steps.count[here].tolist(), strict=True))
        forwards[f].append(
            Active(f, int(steps.layer[s]), int(steps.tokens[f]), counts, tuple(order))
        )
    pooled = fields["scope"] == "global"
    slots = fields["slots"]
    dispatch = policy.dispatch if isinstance(policy.dispatch, OnCpu) else OnCpu()
    return Model(
        Case(
            forwards=forwards,
            requests=steps.request.tolist(),
            experts=steps.num_experts.tolist(),
            sizes=steps.expert_bytes.tolist(),
            top_k=steps.top_k,
            costs=machine.tables(steps),
            admission=policy.admission.name.lower(),
            by_mention=policy.by_mention,
            rule=type(policy.retention).__name__.lower(),
            capacity=None if pooled else [min(slots, e) for e in steps.num_experts.tolist()],
            budget=int(slots[:-1]) if pooled else None,
            staging=fields["staging"],
            persistent=fields["lifecycle"] == "persistent",
            on_cpu=dispatch.experts,
            residents_on_cpu=dispatch.residents,
            ranks=dict(dispatch.ranks),
            asks={k: list(v) for k, v in policy.prefetch.script.items()},
            anew=policy.prefetch.anew,
        )
    )


def difference(case) -> str:
    """What engine and model disagree on; empty if nothing."""
    steps, machine, policy, fields = case
    engine = replay(steps, policy, machine, **fields)
    model = modelled(steps, machine, policy, fields)
    plans = engine.tally.plans
    decided = [
        (STATES[s], PLACES[p], int(k))
        for s, p, k in zip(state_of(plans), place_of(plans), stays_of(plans), strict=True)
    ]
    for i, (mine, theirs) in enumerate(zip(decided, model.decisions, strict=True)):
        if mine != theirs:
            step = int(np.searchsorted(steps.offsets, i, "right")) - 1
            return f"step {step}, expert {steps.expert[i]}: engine {mine}, model {theirs}"
    names = {kind: name for name, kind in KINDS.items()}
    mine = sorted(
        (b, e, names[k], -1 if k == ln.LOG_PREFETCH else f, la, i if _counts(k) else -1)
        for k, b, e, f, la, i in entries(engine)
    )
    theirs = sorted(
        (b, e, kind, f, la, i if _counts(KINDS[kind]) else -1) for kind, b, e, f, la, i in model.log
    )
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return f"timeline: engine {a}, model {b}"
    if len(mine) != len(theirs):
        return f"timeline: engine {len(mine)} entries, model {len(theirs)}"
    if engine.tally.end_ns.tolist() != model.ends:
        return f"ends: engine {engine.tally.end_ns.tolist()}, model {model.ends}"
    sums = engine.tally.by_phase.sum(axis=(0, 1))
    for name, column in (
        ("gpu", r.BUSY_GPU),
        ("copy stall", r.STALL_COPY),
        ("cpu stall", r.STALL_CPU),
        ("cpu", r.BUSY_CPU),
        ("h2d", r.BUSY_H2D),
        ("useful", r.USEFUL_BYTES),
        ("late", r.LATE_BYTES),
        ("moved", r.MOVED_BYTES),
        ("wasted", r.WASTED_BYTES),
    ):
        if sums[column] != model.sums[name]:
            return f"{name}: engine {sums[column]}, model {model.sums[name]}"
    return ""


def _counts(kind: int) -> bool:
    """Entries whose item engine and model count alike."""
    return kind in (
        ln.LOG_HITS,
        ln.LOG_LANDED,
        ln.LOG_COPY,
        ln.LOG_PREFETCH,
        ln.LOG_CPU,
        ln.LOG_OUT,
    )


@pytest.mark.parametrize("seed", [145, 1311, 2226, 501176])
def test_a_fill_that_joins_the_pool_costs_the_slots_of_its_bytes(seed):
    """Experts of different sizes in one pool. The first three found the engine wrong; the last did
    for an audit, of cases that have been drawn otherwise since.
    """
    assert not difference(random_case(np.random.default_rng(seed)))


@pytest.mark.parametrize("block", range(10))
def test_engine_and_simpy_model_agree_to_the_nanosecond(block):
    for seed in seeds(400)[block::10]:
        case = random_case(np.random.default_rng(seed))
        assert not difference(case), f"seed {seed}: {difference(case)}"
