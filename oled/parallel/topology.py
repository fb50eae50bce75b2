"""Topologies: how fast each GPU reaches each other one, as a link matrix.

Shipped topologies are `conf/topology/NAME.yaml`. They give a number for GPUs of the same node and
one for GPUs of different nodes, and may name pairs that differ, as bridges do. Numbers carry spread
and source like those of hardware profiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.hardware.files import check_keys, parse_quantity, read_named, shipped
from oled.hardware.quantity import Dimension, Quantity

_GROUP = "topology"
_WITHIN = ("bandwidth", "latency")
_BETWEEN = ("between_bandwidth", "between_latency")
MOST_GPUS = 1024


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """R GPUs (ranks); rank r is GPU r % gpus_per_node of node r // gpus_per_node."""

    name: str
    description: str
    gpus_per_node: int
    ns_per_byte: NDArray[np.float64]  # [R, R] from, to; 0 on the diagonal
    latency_ns: NDArray[np.int64]  # [R, R] of a message; 0 on the diagonal
    numbers: Mapping[str, str]  # "370 GB/s, measured", by what it is of

    @property
    def ranks(self) -> int:
        """Return R."""
        return len(self.latency_ns)

    @property
    def node(self) -> NDArray[np.int64]:
        """Return the node of each rank [R]."""
        return np.arange(self.ranks) // self.gpus_per_node

    def exchange_ns(self, sent: NDArray[np.int64]) -> int:
        """Return the whole nanoseconds in which all ranks send `sent` bytes [from, to], rounded up.

        A rank's messages leave one after the other, each at its link's rate, and arrive so at the
        other end; the latency of a rank's slowest message is added once. The slowest rank counts.
        What a rank sends to itself is free.
        """
        busy = sent * self.ns_per_byte
        wait = np.where(sent > 0, self.latency_ns, 0)
        leaving = busy.sum(axis=1) + wait.max(axis=1)
        arriving = busy.sum(axis=0) + wait.max(axis=0)
        return int(np.ceil(max(leaving.max(), arriving.max()) - 1e-6))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str) -> Self:
        """Read a topology; `where` (a file, or 'topology') begins every message."""
        known = ("name", "description", "nodes", "gpus_per_node", *_WITHIN)
        check_keys(data, known, optional=(*_BETWEEN, "pairs", "sources"), where=where)
        nodes, per_node = (_count(data[key], f"{where}: {key}") for key in known[2:4])
        if nodes * per_node > MOST_GPUS:
            raise UserError(f"{where}: {nodes * per_node} GPUs; a topology has at most {MOST_GPUS}")
        for key in _BETWEEN:
            if (key in data) != (nodes > 1):
                needs = "is missing" if nodes > 1 else "needs more than one node"
                raise UserError(f"{where}: '{key}' {needs}")
        node = np.arange(nodes * per_node) // per_node
        numbers: dict[str, str] = {}
        rate, latency = np.zeros((2, node.size, node.size))
        links = [(node[:, None] == node[None], *_link(data, _WITHIN, where, numbers))]
        if nodes > 1:
            links.append((node[:, None] != node[None], *_link(data, _BETWEEN, where, numbers)))
        links += _pairs(data.get("pairs") or (), node.size, where, numbers)
        for chosen, bandwidth, delay in links:
            rate[chosen], latency[chosen] = bandwidth, delay
        np.fill_diagonal(latency, 0.0)
        cost = 1e9 / rate
        np.fill_diagonal(cost, 0.0)
        names = (str(data["name"]), str(data["description"]))
        return cls(*names, per_node, cost, np.rint(latency).astype(np.int64), numbers)


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{where} is {value!r}; it must be a number of at least 1")
    return value


def _link(
    data: Mapping[str, Any], keys: tuple[str, str], where: str, numbers: dict[str, str]
) -> tuple[float, float]:
    """Return bytes/s and nanoseconds of a link; note both in `numbers`."""
    found: list[Quantity] = []
    for key, dimension in zip(keys, (Dimension.RATE, Dimension.TIME), strict=True):
        quantity = parse_quantity(data[key], f"{where}: {key}", dimension)
        numbers[key] = f"{quantity.value:g} {quantity.unit}, {quantity.tag}"
        found.append(quantity)
    if found[0].low == 0:
        raise UserError(f"{where}: {keys[0]} has low 0 {found[0].unit}; nothing would arrive")
    return found[0].base, found[1].base


def _pairs(
    data: Any, ranks: int, where: str, numbers: dict[str, str]
) -> Iterator[tuple[NDArray[np.bool_], float, float]]:
    """Yield the links of single pairs of GPUs, the same both ways."""
    for place, pair in enumerate(data):
        here = f"{where}: pairs[{place}]"
        check_keys(pair, ("gpus", *_WITHIN), optional=(), where=here)
        gpus = pair["gpus"]
        inside = isinstance(gpus, list) and all(isinstance(g, int) and 0 <= g < ranks for g in gpus)
        if not inside or len(set(gpus)) != 2:
            raise UserError(f"{here}: gpus is {gpus}; name two of 0 to {ranks - 1}, as [0, 1]")
        chosen = np.zeros((ranks, ranks), dtype=bool)
        chosen[gpus, gpus[::-1]] = True
        own: dict[str, str] = {}
        yield chosen, *_link(pair, _WITHIN, here, own)
        numbers.update({f"{gpus[0]}-{gpus[1]} {key}": text for key, text in own.items()})


def load_topology(source: str | Path | Mapping[str, Any] | Topology) -> Topology:
    """Load a shipped topology by name, a YAML file by path, or a mapping in the file's form."""
    if isinstance(source, Topology):
        return source
    if isinstance(source, Mapping):
        return Topology.from_mapping(source, _GROUP)
    data, where = read_named(_GROUP, source)
    return Topology.from_mapping(data, where)


def list_topologies() -> list[tuple[str, str]]:
    """Return (name, one-line description) of the shipped topologies."""
    return [(name, load_topology(name).description) for name in shipped(_GROUP)]
