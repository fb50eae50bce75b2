"""The clock of several GPUs: forward after forward, layer after layer, whole nanoseconds.

A layer: each rank runs attention, router and shared experts for the tokens that live on it; when
the last has ended and the policy's time has passed, tokens travel to their experts, the ranks
compute, results travel back; the layer ends when all have. So the slowest rank counts everywhere,
and what the others wait for it is `STRAGGLE`. With `chunks` n, transport (there and back) and
computation overlap like a pipeline of n equal pieces:

    (a + c + (n - 1) * max(a, c)) / n        a transport, c the busiest rank's experts

which is their sum for one piece and comes near the larger of them for many; weights are read once
(pieces cost no launches of their own), so it is a fine overlap at its best. A rebalancing comes
before a forward; what it copies is on the links alone, and all of it is waited for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.parallel.layout import Layout
from oled.parallel.placement import LayerStep, Past
from oled.parallel.prices import Prices
from oled.parallel.routing import Routing
from oled.parallel.system import System
from oled.parallel.transport import exchange
from oled.types import Ints

# Columns of Tally.forwards
(
    TIME,
    DENSE,
    COMPUTE,
    COMPUTE_ALL,
    TRANSPORT,
    TRANSPORT_SHOWN,
    STRAGGLE,
    POLICY,
    MOVING,
    MOVES,
    MOVED_BYTES,
    SENT_BYTES,
    PAIRS,
    PAIRS_BUSIEST,
    ACTIVATIONS,
    LAYER_STEPS,
    LEAST,
    COLUMNS,
) = range(18)
"""Times are of the busiest rank, COMPUTE_ALL is the sum over ranks; TRANSPORT_SHOWN is what the
overlap does not hide, LEAST a lower bound of TIME for any placement."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Around:
    """Times of everything but the experts: nanoseconds of the slowest rank."""

    dense_ns: Ints  # [F] of each MoE layer of the forward
    head_ns: Ints  # [F]
    policy_ns: int  # of each MoE layer


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """The counts of a replay."""

    forwards: Ints  # [F, COLUMNS]
    rank_ns: Ints  # [R] time in which each rank computed experts
    layout: Layout  # at the end


def run(routing: Routing, prices: Prices, around: Around, system: System) -> Tally:
    """Replay the routing; the placement is kept from request to request."""
    ranks = prices.topology.ranks
    placement = system.placement
    layout = Layout.contiguous(prices.num_experts, ranks)
    nothing = (placement.interval, prices.num_experts, ranks)
    past = Past.nothing(*nothing)
    rows = np.zeros((len(around.dense_ns), COLUMNS), np.int64)
    rank_ns = np.zeros(ranks, np.int64)
    bounds = np.searchsorted(routing.forward, np.arange(len(rows) + 1))
    for forward, row in enumerate(rows):
        if placement.interval and forward and forward % placement.interval == 0:
            later = placement.rebalance(past, layout, prices)
            _book_moves(row, later, layout, prices)
            layout, past = later, Past.nothing(*nothing)
        for index in range(bounds[forward], bounds[forward + 1]):
            mine = slice(routing.offsets[index], routing.offsets[index + 1])
            step = LayerStep(int(routing.layer[index]), routing.home[mine], routing.expert[mine])
            if placement.interval:
                past.add(step)
            rank_ns += _layer(row, step, layout, prices, system)
        layers = bounds[forward + 1] - bounds[forward]
        row[DENSE] = layers * around.dense_ns[forward] + around.head_ns[forward]
        row[POLICY] = layers * around.policy_ns
        row[TIME] += row[DENSE] + row[POLICY]
        row[LEAST] += row[DENSE] + row[POLICY]
    return Tally(rows, rank_ns, layout)


def _book_moves(row: Ints, later: Layout, earlier: Layout, prices: Prices) -> None:
    topology = prices.topology
    moves = later.moved(earlier, topology.ns_per_byte)
    sent = moves.sent(prices.expert_bytes, topology.ranks)
    row[MOVES], row[MOVED_BYTES] = moves.layer.size, sent.sum()
    row[MOVING] = topology.exchange_ns(sent)
    row[TIME] += row[MOVING]


def _layer(row: Ints, step: LayerStep, layout: Layout, prices: Prices, system: System) -> Ints:
    """Book the experts of a layer; return the time [R] that each rank computes."""
    ranks, experts = layout.holds.shape[1:]
    served = system.placement.deal(step, layout, prices)
    used = served >= 0
    place = served[used] * experts + step.expert[used]
    amount = np.bincount(place, minlength=ranks * experts).reshape(ranks, experts)
    pairs, active = amount.sum(axis=1), np.count_nonzero(amount, axis=1)
    compute = prices.group_ns(step.layer, pairs, active)
    reach = np.zeros((len(step.home), ranks), dtype=bool)
    reach[np.nonzero(used)[0], served[used]] = True
    travel, sent = exchange(step.home, reach, prices.token_bytes, prices.topology, system.transport)
    busiest, n = int(compute.max()), system.chunks
    time = -(-(travel + busiest + (n - 1) * max(travel, busiest)) // n)
    distinct = int(np.count_nonzero(amount.any(axis=0)))
    first = layout.primary[step.layer][step.expert[used]]
    row[TIME] += time
    row[COMPUTE] += busiest
    row[COMPUTE_ALL] += compute.sum()
    row[TRANSPORT] += travel
    row[TRANSPORT_SHOWN] += time - busiest
    row[STRAGGLE] += ranks * busiest - compute.sum()
    row[SENT_BYTES] += sent
    row[PAIRS] += pairs.sum()
    row[PAIRS_BUSIEST] += pairs.max()
    row[ACTIVATIONS] += np.unique(place[served[used] != first]).size
    row[LAYER_STEPS] += 1
    row[LEAST] += prices.least_ns(step.layer, int(pairs.sum()), distinct)
    return compute
