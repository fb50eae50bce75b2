"""Small machines of several GPUs, written by hand or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from oled.parallel.layout import Layout
from oled.parallel.placement import LayerStep, Past
from oled.parallel.prices import Prices
from oled.parallel.topology import Topology


def make_topology(
    ranks: int = 2, per_node: int | None = None, between: float = 2.0, latency: int = 3
) -> Topology:
    """A quarter of a nanosecond a byte inside a node, `between` of one to another node."""
    per_node = per_node or ranks
    node = np.arange(ranks) // per_node
    cost = np.where(node[:, None] == node, 0.25, between)
    wait = np.full((ranks, ranks), latency, np.int64)
    np.fill_diagonal(cost, 0.0)
    np.fill_diagonal(wait, 0)
    return Topology("hand", "", per_node, cost, wait, {})


def make_prices(
    topology: Topology | None = None,
    num_experts: Sequence[int] = (4,),
    top_k: int = 1,
    expert_bytes: int = 100,
    token_bytes: int = 8,
    most_tokens: int = 64,
    t0: int = 10,
    per_token: int = 2,
    per_expert: int = 5,
) -> Prices:
    """A launch group takes t0 + per_token * tokens + per_expert * experts; nothing takes
    nothing."""
    experts = np.array(num_experts, np.int64)
    tokens, active = np.arange(most_tokens + 1)[:, None], np.arange(experts.max() + 1)[None]
    table = np.where(active > 0, t0 + per_token * tokens + per_expert * active, 0)[None]
    return Prices(
        topology=topology or make_topology(),
        num_experts=experts,
        expert_bytes=np.full(experts.size, expert_bytes, np.int64),
        layer_class=np.zeros(experts.size, np.int64),
        gpu_ns=table,
        bound_ns=table,
        token_bytes=token_bytes,
        top_k=top_k,
    )


def make_step(home: Sequence[int], expert: Any, layer: int = 0) -> LayerStep:
    """`expert` [T] for top-1, or [T, k]."""
    ids = np.array(expert, np.int64)
    return LayerStep(layer, np.array(home, np.int64), ids.reshape(len(home), -1))


def random_step(rng: np.random.Generator, prices: Prices, layer: int = 0) -> LayerStep:
    """Tokens on random ranks with popular and unpopular experts; some slots unused."""
    tokens, experts = int(rng.integers(1, 9)), int(prices.num_experts[layer])
    share = rng.dirichlet(np.full(experts, 0.4))
    ids = np.stack([rng.choice(experts, prices.top_k, replace=False) for _ in range(tokens)])
    hot = rng.random(tokens) < 0.5
    ids[hot, 0] = rng.choice(experts, p=share)
    for row in ids:  # no expert twice
        row[1:][row[1:] == row[0]] = -1
    home = np.sort(rng.integers(0, prices.topology.ranks, tokens))
    return LayerStep(layer, home, ids)


def layout_of(holds: Sequence[Sequence[int]], experts: int, primary: Sequence[int]) -> Layout:
    """One layer: `holds[rank]` are the ids that the rank holds."""
    held = np.zeros((1, len(holds), experts), dtype=bool)
    for rank, ids in enumerate(holds):
        held[0, rank, list(ids)] = True
    return Layout(held, np.array([primary], np.int64))


def past_of(steps: Sequence[LayerStep], prices: Prices) -> Past:
    past = Past.nothing(len(steps), prices.num_experts, prices.topology.ranks)
    for step in steps:
        past.add(step)
    return past
