"""The all-to-all around a layer's experts: tokens to the ranks that hold them, results back.

A token crosses once to each rank that has at least one of its experts, in bf16, and one result
comes back from there (the released kernels of DeepEP combine in bf16 and may dispatch in fp8).
`direct`: every message goes straight to its rank. `hierarchical`: a token crosses once to each
*node*, to the rank there with its home's place, and is forwarded inside; results are summed there
and go back the same way. `adaptive` takes the faster of the two in each step; that is our reading
of EPIC's "topology-adaptive" transport, a *reconstruction*.
"""

from __future__ import annotations

import enum

import numpy as np

from oled.parallel.topology import Topology
from oled.types import Bools, Ints


class Transport(enum.StrEnum):
    """A way of sending tokens to the ranks of their experts."""

    DIRECT = "direct"
    HIERARCHICAL = "hierarchical"
    ADAPTIVE = "adaptive"


def exchange(
    home: Ints, reach: Bools, token_bytes: int, topology: Topology, transport: Transport
) -> tuple[int, int]:
    """Return (nanoseconds, bytes sent) of dispatch and combine together.

    home [T] ranks of the tokens, reach bool[T, R] the ranks that have experts of a token.
    """
    one_node = topology.gpus_per_node == topology.ranks
    found = []
    if one_node or transport is not Transport.HIERARCHICAL:
        found.append([_sent(home, reach, token_bytes)])
    if not one_node and transport is not Transport.DIRECT:
        found.append(_by_node(home, reach, token_bytes, topology))
    return min(_both_ways(hops, topology) for hops in found)


def _both_ways(hops: list[Ints], topology: Topology) -> tuple[int, int]:
    """Return time and bytes of hop after hop, there and back; the way back is the transpose."""
    time = sum(topology.exchange_ns(sent) + topology.exchange_ns(sent.T) for sent in hops)
    return time, 2 * sum(int(sent.sum()) for sent in hops)


def _sent(source: Ints, reach: Bools, token_bytes: int) -> Ints:
    """Return bytes [from, to] when each token goes from its source to the ranks it must reach."""
    ranks = reach.shape[1]
    sent = np.zeros((ranks, ranks), np.int64)
    np.add.at(sent, source, reach * np.int64(token_bytes))
    np.fill_diagonal(sent, 0)
    return sent


def _by_node(home: Ints, reach: Bools, token_bytes: int, topology: Topology) -> list[Ints]:
    """Return the bytes of both hops: to one rank of each other node, then inside the nodes."""
    per_node = topology.gpus_per_node
    nodes = topology.ranks // per_node
    inside = reach.reshape(len(home), nodes, per_node)
    gates = np.arange(nodes) * per_node + (home % per_node)[:, None]  # [T, nodes] ranks
    there = inside.any(axis=2)
    to_gates = np.zeros_like(reach)
    np.put_along_axis(to_gates, gates, there, axis=1)
    onward = np.zeros((topology.ranks, topology.ranks), np.int64)
    for node in range(nodes):
        only = np.zeros_like(reach)
        only[:, node * per_node : (node + 1) * per_node] = inside[:, node]
        source = np.where(topology.node[home] == node, home, gates[:, node])
        onward += _sent(source, only, token_bytes)
    return [_sent(home, to_gates, token_bytes), onward]
