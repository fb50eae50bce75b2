"""Signs of a wrong capture that break no rule: repeated forwards, experts that are always active.

Shapes: N rows of a row group, L MoE layers, k top-k, F forwards.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from oled.trace.manifest import Manifest
from oled.trace.schema import NO_EXPERT
from oled.types import Bools, ExpertIds, Ints

LEAST_REPEATS = 5
"""Repeats in a row that are worth a warning; the bundled recordings have none at all."""
LEAST_BITS = 64
"""Bits of a uniform choice that agree in such a run at least: few and small layers stay silent."""
LEAST_ROWS = 32
MAX_CHANCE = 1e-9  # that a uniform router activates one expert in all of the rows
MOST = 5  # warnings of a kind


class Suspects:
    """What the routing rows show as they pass by, with memory for forwards and layers."""

    def __init__(self, manifest: Manifest, request: Ints) -> None:
        shape = manifest.geometry
        self._layers = np.array(shape.moe_layers)
        self._num_ids = np.array(shape.experts_per_layer, dtype=np.int64) + shape.zero_experts
        self._top_k = shape.top_k
        self._request = request  # [F]
        self._seen = np.zeros(len(request), dtype=np.uint64)  # [F] a hash of all rows
        self._rows = np.zeros(len(request), dtype=np.int64)  # [F]
        self._ids = np.full(
            (len(self._layers), shape.top_k), NO_EXPERT, dtype=np.int64
        )  # first row
        self._always = np.ones(self._ids.shape, dtype=bool)  # in every row so far
        self._fixed = np.ones(self._ids.shape, dtype=bool)  # and in the same slot
        self._filled = np.zeros(len(self._layers), dtype=np.int64)  # [L] rows with an expert
        self._empty = np.zeros(len(self._layers), dtype=np.int64)  # [L] rows without one

    def add(self, forward: Ints, place: Ints, token: Ints, ids: ExpertIds) -> None:
        """Take the next rows: known forwards, dense layers, tokens [N] and ids [N, k]."""
        if not len(forward):
            return
        np.add.at(self._seen, forward, _hashes(place, token, ids))
        self._rows += np.bincount(forward, minlength=len(self._rows))
        filled = (ids != NO_EXPERT).any(axis=1)
        layers = len(self._layers)
        self._empty += np.bincount(place[~filled], minlength=layers)
        self._follow(place[filled], ids[filled].astype(np.int64))
        self._filled += np.bincount(place[filled], minlength=layers)

    def _follow(self, place: Ints, ids: Ints) -> None:
        """Strike out the candidates that are not in every row, or not in the same slot."""
        found, first = np.unique(place, return_index=True)
        new = self._filled[found] == 0
        self._ids[found[new]] = ids[first[new]]
        wanted = self._ids[place]  # [N, k]
        for slot in np.flatnonzero(self._always.any(axis=0)).tolist():
            here = wanted[:, slot]
            self._strike(self._always, slot, place, (ids == here[:, None]).any(axis=1))
            self._strike(self._fixed, slot, place, ids[:, slot] == here)

    def _strike(self, kept: Bools, slot: int, place: Ints, hit: Bools) -> None:
        kept[np.unique(place[~hit]), slot] = False

    def notes(self) -> tuple[str, ...]:
        """Return what is legitimate but worth knowing."""
        count = int(self._empty.sum())
        return (f"{count} rows name no expert: tokens that were routed nowhere",) if count else ()

    def warnings(self) -> tuple[str, ...]:
        """Return one line for each suspicion."""
        return (*self._repeats(), *self._constant(), *self._never())

    def _repeats(self) -> list[str]:
        """Judge forwards whose ids are those of the request's forward before, in all layers."""
        order = np.argsort(self._request, kind="stable")
        seen, rows, request = self._seen[order], self._rows[order], self._request[order]
        same = (seen[1:] == seen[:-1]) & (request[1:] == request[:-1]) & (rows[1:] > 0)
        edges = np.diff(np.concatenate(([0], same.astype(np.int8), [0])))
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)  # of repeats
        bits = (ends - begins) * rows[begins] * _bits_of_row(self._num_ids, self._top_k)
        wrong = np.flatnonzero((ends - begins >= LEAST_REPEATS) & (bits >= LEAST_BITS))
        found = [
            f"forwards {order[begins[run]]} to {order[ends[run]]} of request "
            f"{request[begins[run]]}: {ends[run] - begins[run] + 1} forwards in a row have the "
            f"same ids in every layer: a buffer that was captured again instead of the router?"
            for run in wrong[:MOST]
        ]
        return found + ([f"… and {len(wrong) - MOST} more such runs"] if len(wrong) > MOST else [])

    def _constant(self) -> list[str]:
        """Judge experts that are in every row of a layer, grouped by expert and slot."""
        rare = self._filled >= LEAST_ROWS
        rare &= (self._top_k / self._num_ids) ** self._filled.clip(max=10**6) < MAX_CHANCE
        always = self._always & rare[:, None] & (self._ids != NO_EXPERT)
        fixed = self._fixed & always
        places = sorted(
            (int(self._ids[layer, slot]), int(slot) if fixed[layer, slot] else -1, int(layer))
            for layer, slot in np.argwhere(always)
        )
        found = []
        for (expert, slot), group in groupby(places, key=lambda one: one[:2]):
            layers = [layer for _, _, layer in group]
            where = f", always in slot {slot}" if slot >= 0 else ""
            found.append(
                f"expert {expert} is in all {self._filled[layers].sum()} rows of "
                f"{self._named(layers)}{where}: a shared expert that counts as a routed one, or a "
                f"column that was not captured? Hit rates come out too high"
            )
        more = [f"… and {len(found) - MOST} more such experts"] if len(found) > MOST else []
        return found[:MOST] + more

    def _never(self) -> list[str]:
        """Judge layers in which no row names an expert."""
        layers = np.flatnonzero((self._filled == 0) & (self._empty > 0)).tolist()
        if not layers:
            return []
        return [f"no row of {self._named(layers)} names an expert: was its router captured?"]

    def _named(self, places: list[int]) -> str:
        if len(places) == len(self._layers) > 1:
            return f"all {len(places)} layers"
        names = [str(self._layers[place]) for place in places]
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        return f"layer{'s' if len(names) > 1 else ''} {', '.join(names[:MOST])}{more}"


def _bits_of_row(num_ids: Ints, top_k: int) -> float:
    """Return the bits of one row's uniform choice, averaged over layers: log2 of E over k."""
    slots = np.arange(top_k)
    return float(np.mean([np.log2((each - slots) / (slots + 1)).sum() for each in num_ids]))


def _hashes(place: Ints, token: Ints, ids: ExpertIds) -> NDArray[np.uint64]:
    """Return one hash of each row, u64[N]; the sum of a forward's stands for all of its ids."""
    mixed = (place.astype(np.uint64) << np.uint64(32)) | token.astype(np.uint64)
    for slot in range(ids.shape[1]):
        mixed = _mix(mixed ^ (ids[:, slot].astype(np.uint64) + np.uint64(slot << 20)))
    return mixed


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of splitmix64 of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
