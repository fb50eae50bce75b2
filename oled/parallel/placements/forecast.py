"""A layer's step times as predicted from past steps, and the changes that shorten them.

The forecast is that the steps since the last rebalancing come again, one by one: it is their
busiest ranks that count, not the ranks' means. In each step an expert costs what an active expert
and its pairs cost in the machine's table; a standby copy serves it in the steps in which that
relieves the busiest rank.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np

from oled.parallel.layout import Layout
from oled.parallel.placement import Past
from oled.parallel.prices import Prices
from oled.types import Bools, Doubles, Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """`expert` is copied from the busiest rank to `rank`, in the place of `other` (-1: a free
    slot).

    A swap moves first copies: `other` goes the other way. Else the new copy is a standby one.
    """

    expert: int
    rank: int
    other: int
    swap: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """One layer and W past steps of it."""

    holds: Bools  # [R, E]
    primary: Ints  # [E]
    weight: Doubles  # [W, E] ns of an expert's work
    pairs: Doubles  # [R, E] mean pairs of a step, by the rank that the token lives on
    spare: int  # slots of a rank for standby copies
    expert_bytes: int
    prices: Prices

    @classmethod
    def of(cls, layer: int, past: Past, layout: Layout, prices: Prices, spare: int) -> Self:
        """Build the forecast from the steps in `past`, at least one."""
        experts, ranks = int(prices.num_experts[layer]), prices.topology.ranks
        counts = past.counts[: past.steps[layer], layer, :experts]
        active, mean = (counts > 0).sum() / len(counts), counts.sum() / len(counts)
        an_expert, a_pair = prices.slopes(layer, mean / ranks, active / ranks)
        return cls(
            holds=layout.holds[layer, :, :experts],
            primary=layout.primary[layer, :experts],
            weight=an_expert * (counts > 0) + a_pair * counts,
            pairs=past.pairs[layer, :, :experts] / len(counts),
            spare=spare,
            expert_bytes=int(prices.expert_bytes[layer]),
            prices=prices,
        )

    def improved(self, payback: int) -> Self | None:
        """Return the forecast after the best change.

        None where no change saves the time of its copies in `payback` steps like these.
        """
        load = self.load()
        busiest = _busiest(load)
        now = float(load.max(axis=1).sum()) + self._exchange_ns()
        best, most = None, 0.0
        for change in self._promising(load, busiest):
            later = self._after(change, busiest)
            coming = float(later.load().max(axis=1).sum()) + later._exchange_ns()
            gain = (now - coming) * payback / len(self.weight) - self._copy_ns(change, busiest)
            if gain > most:
                best, most = later, gain
        return best

    def load(self) -> Doubles:
        """Return each rank's predicted compute f64[W, R]; standby copies are used one by one."""
        ranks = len(self.holds)
        first = (self.primary[:, None] == np.arange(ranks)).astype(np.float64)
        load: Doubles = self.weight @ first
        for rank, expert in np.argwhere(self._standby()).tolist():
            moved = load.copy()
            moved[:, rank] += self.weight[:, expert]
            moved[:, self.primary[expert]] -= self.weight[:, expert]
            helps = moved.max(axis=1) < load.max(axis=1)
            load[helps] = moved[helps]
        return load

    def _standby(self) -> Bools:
        standby = self.holds.copy()
        standby[self.primary, np.arange(self.primary.size)] = False
        return standby

    def _exchange_ns(self) -> float:
        """Return the time of tokens there and back in all steps, spread over an expert's copies."""
        share = self.holds / self.holds.sum(axis=0)
        sent = self.prices.token_bytes * (self.pairs @ share.T)
        busy = sent * self.prices.topology.ns_per_byte
        slowest = max(busy.sum(axis=0).max(), busy.sum(axis=1).max())
        return float(2 * slowest * len(self.weight))

    def _copy_ns(self, change: Change, busiest: int) -> float:
        """Return the ns of a change: a copy from the busiest rank, or a swap both ways at once."""
        link = self.prices.topology.ns_per_byte
        there = link[busiest, change.rank]
        back = link[change.rank, busiest] if change.swap else 0.0
        return float(self.expert_bytes * max(there, back))

    def _promising(self, load: Doubles, busiest: int) -> list[Change]:
        """Return the best copy to each rank, and the best swap with the idlest rank."""
        mine = np.flatnonzero(self.primary == busiest)
        if mine.size == 0:
            return []
        standby, found = self._standby(), []
        for rank in range(len(self.holds)):
            if rank == busiest or self.spare == 0:
                continue
            full = standby[rank].sum() >= self.spare
            other = self._least_useful(standby[rank]) if full else -1
            able = mine[~self.holds[rank, mine]]
            if able.size:
                weight = self.weight[:, able]
                peak = self._peaks(load, busiest, rank, -weight, weight)
                best = np.minimum(peak, load.max(axis=1)[:, None]).sum(axis=0)
                found.append(Change(int(able[np.argmin(best)]), rank, other, swap=False))
        idlest = int(np.argmin(load.sum(axis=0)))
        single = self.holds.sum(axis=0) == 1
        give, take = mine[single[mine]], np.flatnonzero(single & (self.primary == idlest))
        if idlest != busiest and give.size and take.size:
            less = self.weight[:, give][:, :, None] - self.weight[:, take][:, None, :]
            peak = self._peaks(load, busiest, idlest, -less, less).sum(axis=0)
            e, f = np.unravel_index(int(np.argmin(peak)), peak.shape)
            found.append(Change(int(give[e]), idlest, int(take[f]), swap=True))
        return found

    def _peaks(self, load: Doubles, one: int, other: int, more: Doubles, less: Doubles) -> Doubles:
        """Return the busiest rank's time [W, ...] with `more` on `one`, `less` on `other`."""
        rest = np.delete(load, [one, other], axis=1).max(axis=1, initial=0.0)
        rest, first, second = (
            x.reshape(-1, *(1,) * (more.ndim - 1)) for x in (rest, load[:, one], load[:, other])
        )
        peak: Doubles = np.maximum(rest, np.maximum(first + more, second + less))
        return peak

    def _least_useful(self, standby: Bools) -> int:
        """Return the rank's standby copy with least work in all steps."""
        mine = np.flatnonzero(standby)
        return int(mine[np.argmin(self.weight[:, mine].sum(axis=0))])

    def _after(self, change: Change, busiest: int) -> Self:
        holds, primary = self.holds.copy(), self.primary.copy()
        holds[change.rank, change.expert] = True
        if change.swap:
            holds[busiest, change.expert] = holds[change.rank, change.other] = False
            holds[busiest, change.other] = True
            primary[change.expert], primary[change.other] = change.rank, busiest
        elif change.other >= 0:
            holds[change.rank, change.other] = False
        return dataclasses.replace(self, holds=holds, primary=primary)


def _busiest(load: Doubles) -> int:
    """Return the rank that the steps wait for longest: with most time as the busiest one."""
    peak = load.max(axis=1, keepdims=True)
    return int(np.argmax(np.where(load == peak, load, 0.0).sum(axis=0)))
