"""EPLB: hot experts get more copies, and copies are packed evenly onto the GPUs (DeepSeek).

Source: deepseek-ai/EPLB, `eplb.py` (MIT). Read in code: a copy at a time goes to the expert with
most tokens per copy, until all slots are used; then the copies, those with most tokens first, go
each to the rank with fewest tokens so far that has a slot free. With several nodes the experts are
first packed onto nodes in the same way (there in the groups of a group-limited router, here one by
one), and replicated and packed inside. The load is that of the forwards since the last time.
*Reconstruction*: the released code ends with the map, so here tokens of an expert go to its copies
in turn; an expert has no more copies than there are ranks, and a second one on a rank only where no
other has room (a wasted slot); between rebalancings lie `interval` forwards (serving engines wait
for thousands, more than a recorded trace has); what moves is copied before the next forward, and
all of it is waited for. Cost: O(slots x ranks) a layer and rebalancing, O(T k) a step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled.parallel.layout import Layout
from oled.parallel.placement import LayerStep, Past, Placement
from oled.parallel.prices import Prices
from oled.types import Doubles, Ints


def replicate(load: Doubles, slots: int, most: int) -> Ints:
    """Return copies of each expert i64[E], `slots` in all, that make the most tokens a copy least.

    At least one and at most `most` of each.
    """
    copies = np.ones(load.size, np.int64)
    for _ in range(slots - load.size):
        copies[np.argmax(np.where(copies < most, load / copies, -1.0))] += 1
    return copies


def pack(load: Doubles, item: Ints, packs: int) -> Ints:
    """Return the pack of each of n objects i64[n], heaviest first to the lightest pack with room.

    `load` f64[n] of the objects, `item` i64[n] what they are copies of. A pack holds n / packs of
    them, rounded up, and two of the same item only where no other pack has room.
    """
    room = np.full(packs, -(-load.size // packs))
    weight = np.zeros(packs)
    found = np.empty(load.size, np.int64)
    has: list[set[int]] = [set() for _ in range(packs)]
    for place in np.argsort(-load, kind="stable").tolist():
        twice = np.array([int(item[place]) in mine for mine in has])
        pack = int(np.lexsort((weight, twice, room == 0))[0])
        found[place] = pack
        room[pack] -= 1
        weight[pack] += load[place]
        has[pack].add(int(item[place]))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Eplb(Placement):
    """Replication and packing by the tokens of the last `interval` forwards."""

    interval: int = 64
    spare: int = 2
    by_node: bool = True  # with several nodes: experts to nodes first

    def rebalance(self, past: Past, layout: Layout, prices: Prices) -> Layout:
        holds = np.zeros_like(layout.holds)
        slots = self.slots(prices.num_experts, prices.topology.ranks)
        for layer, experts in enumerate(prices.num_experts.tolist()):
            load = past.pairs[layer, :, :experts].sum(axis=0).astype(np.float64)
            holds[layer, :, :experts] = self._place(load, int(slots[layer]), prices)
        primary = np.where(layout.primary >= 0, holds.argmax(axis=1), -1)
        return Layout(holds, primary)

    def _place(self, load: Doubles, slots: int, prices: Prices) -> NDArray[np.bool_]:
        """Return which rank holds which expert bool[R, E] of a layer with `slots` a rank."""
        topology = prices.topology
        ranks, per_node = topology.ranks, topology.gpus_per_node
        nodes = ranks // per_node if self.by_node else 1
        per_node = ranks // nodes
        node = pack(load, np.arange(load.size), nodes)
        holds = np.zeros((ranks, load.size), dtype=bool)
        for place in range(nodes):
            mine = np.flatnonzero(node == place)
            copies = replicate(load[mine], per_node * slots, per_node)
            item = np.repeat(mine, copies)
            share = np.repeat(load[mine] / copies, copies)
            holds[place * per_node + pack(share, item, per_node), item] = True
        return holds

    def deal(self, step: LayerStep, layout: Layout, prices: Prices) -> Ints:
        """Deal the tokens of an expert to its copies in turn."""
        served = Placement.deal(self, step, layout, prices)
        holds = layout.holds[step.layer]
        copies = holds.sum(axis=0)
        flat, expert = served.reshape(-1), step.expert.reshape(-1)
        for e in np.unique(expert[(expert >= 0) & (copies[expert] > 1)]).tolist():
            ranks = np.flatnonzero(holds[:, e])
            mine = np.flatnonzero(expert == e)
            flat[mine] = ranks[np.arange(mine.size) % ranks.size]
        return served
