"""The all-to-all: bytes and times by hand, and that the adaptive one takes the faster way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.parallel.transport import Transport, exchange
from tests.support.seeds import sized

from .build import make_topology

DIRECT, HIERARCHICAL, ADAPTIVE = Transport


def reach_of(*ranks: tuple[int, ...], of: int) -> np.ndarray:
    reach = np.zeros((len(ranks), of), dtype=bool)
    for token, mine in enumerate(ranks):
        reach[token, list(mine)] = True
    return reach


def test_a_token_crosses_once_to_each_rank_and_back() -> None:
    """Tokens of 8 bytes on ranks 0, 0, 1: 0 sends 16 to 1 and 8 to 2, 1 sends nothing.

    Out: 24 / 4 + 3 = 9, back the same; 48 bytes.
    """
    reach = reach_of((0, 1), (1, 2), (1,), of=3)
    found = exchange(np.array([0, 0, 1]), reach, 8, make_topology(3), DIRECT)
    assert found == (18, 48)
    assert exchange(np.array([0, 0, 1]), reach, 8, make_topology(3), ADAPTIVE) == found


def test_between_nodes_a_token_crosses_once_to_each_node() -> None:
    """Ranks 0, 1 and 2, 3. The token of rank 1 needs 0, 2 and 3.

    Direct: 1 sends 8 bytes at 2 ns to each of 2 and 3, and 8 at a quarter to 0: 16 + 16 + 2 + 3 =
    37. By nodes: to 3, which has rank 1's place there, 16 + 3 = 19; then 3 to 2 and 1 to 0, 2 + 3 =
    5.
    """
    topology = make_topology(4, per_node=2)
    home, reach = np.array([1]), reach_of((0, 2, 3), of=4)
    assert exchange(home, reach, 8, topology, DIRECT) == (74, 48)
    assert exchange(home, reach, 8, topology, HIERARCHICAL) == (48, 48)
    assert exchange(home, reach, 8, topology, ADAPTIVE) == (48, 48)


@settings(max_examples=sized(60))
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_ways_agree_on_what_crosses_between_nodes(seed: int, nodes: int, per_node: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = nodes * per_node
    topology = make_topology(ranks, per_node)
    tokens = int(rng.integers(1, 9))
    home = rng.integers(0, ranks, tokens)
    reach = rng.random((tokens, ranks)) < 0.3
    ways = {way: exchange(home, reach, 8, topology, way) for way in Transport}
    assert ways[ADAPTIVE] == min(ways[DIRECT], ways[HIERARCHICAL])
    remote = reach.copy()
    remote[np.arange(tokens), home] = False
    assert ways[DIRECT][1] == 16 * remote.sum()
    if nodes == 1:
        assert ways[DIRECT] == ways[HIERARCHICAL]
    if per_node == 1:  # a node is a rank: nothing to forward
        assert ways[DIRECT] == ways[HIERARCHICAL]
    nothing = np.zeros_like(reach)
    nothing[np.arange(tokens), home] = True
    assert exchange(home, nothing, 8, topology, ADAPTIVE) == (0, 0)


def test_names_are_what_the_configuration_says() -> None:
    assert [Transport(name) for name in ("direct", "hierarchical", "adaptive")] == list(Transport)
    with pytest.raises(ValueError, match="fast"):
        Transport("fast")
