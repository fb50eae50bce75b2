"""Compositions that place experts once and for all: no order of forwards is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oled.errors import UserError
from oled.policies.composition import Composition, load_composition
from oled.policies.files import read_policy
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
from oled.trace import trace_of_records
from oled.trace.synthetic import LAYERED, Workload, synthetic, synthetic_manifest

from .test_compositions import TOY

PLACED = ("cpu_all", "llama_cpp")
LRU = {"_target_": "oled.policies.retention.lru.Lru"}


@pytest.fixture(scope="module")
def records() -> list[Any]:
    return list(synthetic(TOY, Workload(requests=3, blocks=2, block_length=8), LAYERED))


def metrics(records: list[Any], policy: Any, *, ordered: bool = True) -> dict[str, Any]:
    about = synthetic_manifest(TOY, Workload(), LAYERED, seed=0, model_seed=0)
    trace = trace_of_records(replace(about, ordered=ordered), records)
    found = simulate(PreparedTrace.of(trace), policy, slots=5, references=False).metrics
    return {key: found[key] for key in ("tpot_ns", "hit_rate", "cpu_executions", "transfers")}


@pytest.mark.parametrize("policy", PLACED)
def test_a_trace_without_order_will_do(records: list[Any], policy: str) -> None:
    assert not load_composition(policy).needs
    expected = metrics(records, policy)
    shuffled = [records[i] for i in np.random.default_rng(0).permutation(len(records))]
    renumbered = [replace(one, pass_id=number) for number, one in enumerate(shuffled)]
    assert metrics(renumbered, policy, ordered=False) == expected
    with pytest.raises(UserError, match="policy 'lru' needs the order of forwards"):
        metrics(renumbered, "lru", ordered=False)


@pytest.mark.parametrize("policy", PLACED)
def test_nothing_has_changed_but_the_need(records: list[Any], policy: str) -> None:
    data, where = read_policy(policy)
    before = Composition.from_mapping({**data, "retention": LRU}, where)
    assert before.needs == {"order"}
    assert metrics(records, before) == metrics(records, policy)


def test_it_admits_nobody() -> None:
    data, where = read_policy("cpu_all")
    with pytest.raises(UserError, match=r"cpu_all.*is 'demand', but the retention scores"):
        Composition.from_mapping({**data, "admission": "demand"}, where)
