"""Topologies: link matrices from a few numbers, the time of an exchange, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled.errors import UserError
from oled.parallel.topology import list_topologies, load_topology
from tests.support.seeds import sized

from .build import make_topology


def number(value: float, unit: str) -> dict[str, Any]:
    source = {"tag": "assumed", "source": "test"}
    return {"value": value, "low": value, "high": value, "unit": unit, **source}


def two_nodes() -> dict[str, Any]:
    return {
        "name": "two",
        "description": "2 nodes of 2",
        "nodes": 2,
        "gpus_per_node": 2,
        "bandwidth": number(100, "GB/s"),
        "latency": number(2, "us"),
        "between_bandwidth": number(10, "GB/s"),
        "between_latency": number(9, "us"),
    }


def test_a_matrix_from_numbers_within_and_between_nodes() -> None:
    found = load_topology(two_nodes())
    assert (found.ranks, found.node.tolist()) == (4, [0, 0, 1, 1])
    expected = [[0, 0.01, 0.1, 0.1], [0.01, 0, 0.1, 0.1], [0.1, 0.1, 0, 0.01], [0.1, 0.1, 0.01, 0]]
    np.testing.assert_allclose(found.ns_per_byte, expected)
    assert found.latency_ns[0].tolist() == [0, 2000, 9000, 9000]
    assert found.numbers["between_bandwidth"] == "10 GB/s, assumed"


def test_single_pairs_may_differ() -> None:
    data = two_nodes()
    bridge = {"bandwidth": number(50, "GB/s"), "latency": number(1, "us")}
    data["pairs"] = [{"gpus": [0, 3], **bridge}]
    found = load_topology(data)
    assert found.ns_per_byte[0, 3] == found.ns_per_byte[3, 0] == 0.02
    assert found.latency_ns[0].tolist() == [0, 2000, 9000, 1000]
    assert found.numbers["0-3 bandwidth"] == "50 GB/s, assumed"


def test_an_exchange_lasts_as_long_as_its_busiest_port() -> None:
    """Quarter nanoseconds a byte, latency 3. Rank 0 sends 8 and 16 bytes: 6 + 3; 1 receives 8 + 40.

    What stays on a rank is free, and a byte that takes a part of a nanosecond counts as one.
    """
    topology = make_topology(3)
    sent = np.array([[1000, 8, 16], [0, 0, 0], [0, 0, 0]])
    assert topology.exchange_ns(sent) == 9
    sent[2, 1] = 40
    assert topology.exchange_ns(sent) == 15
    assert topology.exchange_ns(np.diag([5, 5, 5])) == 0
    assert topology.exchange_ns(np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]])) == 4


@settings(max_examples=sized(50))
@given(st.lists(st.integers(0, 100), min_size=9, max_size=9), st.integers(0, 8))
def test_more_bytes_never_take_less_and_the_way_back_is_as_long(sent: list[int], more: int) -> None:
    topology, matrix = make_topology(3), np.array(sent).reshape(3, 3)
    np.fill_diagonal(matrix, 0)
    time = topology.exchange_ns(matrix)
    assert time == topology.exchange_ns(matrix.T)
    matrix[more // 3, more % 3] += 10 * (more // 3 != more % 3)
    assert topology.exchange_ns(matrix) >= time


def test_shipped_topologies_name_their_sources() -> None:
    names = [name for name, _ in list_topologies()]
    assert {"nvlink_8", "pcie_gen4_4", "pcie_gen5_4", "nodes_2x4"} <= set(names)
    for name in names:
        topology = load_topology(name)
        off = ~np.eye(topology.ranks, dtype=bool)
        assert (topology.ns_per_byte[off] > 0).all()
        assert (np.diag(topology.ns_per_byte) == 0).all()
        assert topology.numbers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"gpus_per_node": "four"}, "gpus_per_node is 'four'"),
        ({"gpus_per_node": 1000}, "2000 GPUs; a topology has at most"),
        ({"nodes": 1}, "'between_bandwidth' needs more than one node"),
        ({"between_latency": None}, "'between_latency' is missing"),
        ({"speed": 1}, "field 'speed' is not known"),
        ({"bandwidth": "fast"}, "bandwidth is 'fast'"),
        ({"bandwidth": number(0, "GB/s")}, "nothing would arrive"),
        ({"latency": number(1, "GB/s")}, "latency is 1 in unit 'GB/s'"),
        ({"pairs": [{"gpus": [0, 4], "bandwidth": 1, "latency": 1}]}, r"name two of 0 to 3"),
        ({"pairs": [{"gpus": [1, 1], "bandwidth": 1, "latency": 1}]}, r"name two of 0 to 3"),
    ],
)
def test_wrong_topologies_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    data = copy.deepcopy(two_nodes()) | change
    data = {key: value for key, value in data.items() if value is not None}
    with pytest.raises(UserError, match=message) as refused:
        load_topology(data)
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="did you mean 'nvlink_8'"):
        load_topology("nvlink8")
