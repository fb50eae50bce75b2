"""Coop and exact dispatch against all ways to split up to ten misses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.policies.decide import classify_residency
from oled.policies.dispatch.coop import Coop
from oled.policies.dispatch.exact import Exact
from oled.policies.interface import ON_CPU, TRANSFER, Cache, Costs, Plan, Step
from tests.support.seeds import seeds

from .build import call, make_cache, make_costs, make_plan, make_step, memory_of

EXPERTS = 16


@dataclass
class Case:
    """A step with `misses` missing experts; the others are resident."""

    step: Step
    cache: Cache
    costs: Costs
    missing: list[int]  # places in the active set

    def plan(self, part: Any) -> Plan:
        plan = make_plan(experts=EXPERTS)
        classify_residency(self.step, self.cache, plan)
        call(
            part.dispatch,
            self.step,
            self.cache,
            self.costs,
            plan,
            memory_of(part, self.cache),
            part.params(),
        )
        return plan

    def copied(self, part: Any) -> NDArray[np.bool_]:
        plan = self.plan(part)
        return np.array([plan.place[i] == TRANSFER for i in self.missing])

    def cpu_times(self) -> NDArray[np.int64]:
        return self.costs.cpu_ns[0, self.step.count[self.missing]]

    def reuse(self) -> NDArray[np.float64]:
        """Scores of the misses, scaled to 0..1."""
        score = self.cache.score[0, self.step.expert[self.missing]]
        return (score - score.min()) / max(float(np.ptp(score)), 1e-300)


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    misses, hits = int(rng.integers(1, 11)), int(rng.integers(0, 6))
    active = misses + hits
    resident = sorted(rng.choice(active, hits, replace=False).tolist())
    count = rng.integers(1, 17, active).tolist()
    step = make_step(list(range(active)), count=count, tokens=16)
    cache = make_cache(experts=EXPERTS, slots=hits, resident={0: resident})
    cache.score[0, :active] = rng.random(active)
    costs = make_costs(
        gpu_ns=int(rng.integers(1, 500)),
        cpu_ns=np.cumsum([0, *(rng.integers(0, 40, 16) * rng.integers(0, 2, 16))]).tolist(),
        copy_ns=int(rng.integers(20, 300)),
        act_ns=int(rng.integers(0, 60)),
        copy_wake_ns=int(rng.integers(0, 60)),
        cpu_call_ns=int(rng.integers(0, 60)),
        cpu_contention_ppm=int(rng.choice([1_000_000, 800_000, 500_000])),
        link_contention_ppm=int(rng.choice([1_000_000, 800_000, 400_000])),
    )
    return Case(step, cache, costs, [i for i in range(active) if i not in resident])


def all_splits(misses: int) -> NDArray[np.bool_]:
    """Every set of copied misses: bool[2^misses, misses]."""
    return np.array(list(itertools.product([False, True], repeat=misses)))


def simple_makespan(case: Case, copied: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Coop's: the longer of the copies and the CPU with its call. copied bool[splits, misses]."""
    copies = copied.sum(axis=1) * case.costs.copy_ns[0]
    work = (~copied @ case.cpu_times()) + case.costs.cpu_call_ns
    return np.maximum(copies, np.where(copied.all(axis=1), 0, work)).astype(np.float64)


def coop_objective(case: Case, copied: NDArray[np.bool_], mu: float) -> NDArray[np.float64]:
    return simple_makespan(case, copied) - mu * case.costs.copy_ns[0] * (copied @ case.reuse())


def full_makespan(case: Case, copied: NDArray[np.bool_]) -> int:
    """Exact's, by letting time pass: copies begin at 0, the CPU when the activations are there."""
    costs, step = case.costs, case.step
    hits = step.expert.size - len(case.missing)
    hits_ns = int(costs.gpu_ns[0, 0, hits])
    link, work = 0, 0
    if copied.any():
        link = int(costs.copy_wake_ns + copied.sum() * costs.copy_ns[0])
    if not copied.all():
        work = int(costs.cpu_call_ns + case.cpu_times()[~copied].sum())
    out = int(costs.act_out_ns[step.tokens])
    alone = min(link, out) if work else link
    link_left, now = link - alone, alone
    per_ns = costs.link_contention_ppm, costs.cpu_contention_ppm  # work done in a ns, millionths
    both = 0
    while link_left * 1_000_000 > both * per_ns[0] and work * 1_000_000 > both * per_ns[1]:
        both += 1
    link_rest = max(0, link_left - both * per_ns[0] // 1_000_000)
    now += both
    link_end = now + link_rest if link_left else alone
    cpu_end = (now if link_left else out) + max(0, work - both * per_ns[1] // 1_000_000)
    on_gpu = max(hits_ns, link_end) + int(costs.gpu_ns[0, 1, 1]) if link else hits_ns
    return max(on_gpu, cpu_end + int(costs.act_back_ns[step.tokens]) if work else 0)


def test_exact_is_the_best_of_all_splits() -> None:
    for seed in seeds(150):
        case = random_case(seed)
        splits = all_splits(len(case.missing))
        best = min(full_makespan(case, split) for split in splits)
        assert full_makespan(case, case.copied(Exact())) == best, seed


def test_exact_copies_what_will_be_used_again() -> None:
    """Equally long on the CPU: the highest scores are copied, in this order."""
    step = make_step([0, 1, 2, 3], count=[1, 1, 1, 1])
    cache = make_cache(experts=EXPERTS)
    cache.score[0, :4] = [0.1, 0.9, 0.2, 0.8]
    case = Case(step, cache, make_costs(cpu_ns=100, copy_ns=100), [0, 1, 2, 3])
    plan = case.plan(Exact())
    assert [int(plan.place[i]) for i in range(4)] == [ON_CPU, TRANSFER, ON_CPU, TRANSFER]
    assert plan.rank[1] < plan.rank[3]


def test_coop_worked_by_hand() -> None:
    # Five misses by tokens: 3 (8), 0 (4), 1, 2 and 4 (1 each); CPU 40 a token, call 10, copy 60.
    #   n 0: 610;  1: 60 or 290;  2: 120 or 130;  3: 180 or 90  ->  n = 2, experts 3 and 0.
    # Reuse: 0 -> 0, 1 -> 0.5, 2 -> 1, 3 -> 0.75, 4 -> 0.25. To swap 0 for 2 costs 120 on the CPU.
    step = make_step([0, 1, 2, 3, 4], count=[4, 1, 1, 8, 1])
    cache = make_cache(experts=EXPERTS)
    cache.score[0, :5] = [1.0, 3.0, 5.0, 4.0, 2.0]
    costs = make_costs(cpu_ns=[40 * n for n in range(17)], cpu_call_ns=10, copy_ns=60)
    case = Case(step, cache, costs, [0, 1, 2, 3, 4])
    assert case.copied(Coop()).tolist() == [True, False, False, True, False]
    assert case.copied(Coop(mu=1.9)).tolist() == [True, False, False, True, False]
    assert case.copied(Coop(mu=2.1)).tolist() == [False, False, True, True, False]
    assert case.plan(Coop()).rank[:5].tolist() == [1, 2, 3, 0, 4]


def test_coop_swaps_one_after_the_other() -> None:
    """Equal loads: two of four are copied, and the swaps bring in the two best scores."""
    step = make_step([0, 1, 2, 3])
    cache = make_cache(experts=EXPERTS)
    cache.score[0, :4] = [0.0, 0.1, 0.5, 1.0]
    case = Case(step, cache, make_costs(cpu_ns=100, copy_ns=100), [0, 1, 2, 3])
    assert case.copied(Coop(swaps=0)).tolist() == [True, True, False, False]
    assert case.copied(Coop(swaps=1)).tolist() == [False, True, False, True]
    assert case.copied(Coop(swaps=2)).tolist() == [False, False, True, True]
    assert case.copied(Coop(mu=0.0)).tolist() == [True, True, False, False]


def test_coops_initial_split_is_the_best_without_reuse() -> None:
    for seed in seeds(150):
        case = random_case(seed)
        splits = all_splits(len(case.missing))
        got = simple_makespan(case, case.copied(Coop(mu=0.0))[None])
        assert got == simple_makespan(case, splits).min(), seed


def test_coop_is_within_mu_makespans_of_the_best_of_all_splits() -> None:
    """With reuse in the objective; distances in shares of the best makespan without it.

    The reward of a split is at most mu times its copies' time, so its objective is at least 1 - mu
    best makespans; Coop's is at most one. Most cases are much nearer.
    """
    for mu in (0.25, 0.5):
        distances = []
        for seed in range(300):
            case = random_case(seed)
            splits, copied = all_splits(len(case.missing)), case.copied(Coop(mu=mu))
            got = coop_objective(case, copied[None], mu)[0]
            scale = max(1.0, simple_makespan(case, splits).min())
            distances.append((got - coop_objective(case, splits, mu).min()) / scale)
        assert np.all(np.quantile(distances, [0.5, 0.9, 1.0]) <= [0.01, 0.6 * mu, mu])
