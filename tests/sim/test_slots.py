"""What `cache.slots` and the other cache settings may be, and what they mean."""

from __future__ import annotations

import numpy as np
import pytest

from oled.errors import UserError
from oled.sim.settings import Settings
from oled.sim.slots import parse_bytes, parse_slots

EVEN = np.array([100, 100]), np.array([10, 10])  # experts, bytes
UNEVEN = np.array([8, 6, 4]), np.array([10, 20, 50])


def room(slots, scope, layers) -> tuple[list[int], int]:
    budget = parse_slots(slots, scope, *layers)
    return budget.capacity.tolist(), budget.total_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("2GB", 2 * 10**9),
        ("250 MiB", 250 * 2**20),
        ("1.5KiB", 1536),
        (".5KB", 500),
        ("0B", 0),
        (" 3B ", 3),
    ],
)
def test_amounts_of_memory(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["8", "8gib", "GiB", ".GiB", "1.2.3GiB", "-1GiB", "1e3B", "", "."])
def test_other_text_is_no_amount_of_memory(text):
    with pytest.raises(UserError, match="no amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize("slots", [40, "40", " 40 ", np.int64(40)])
def test_an_integer_is_slots_of_each_layer(slots):
    assert room(slots, "layer", EVEN) == ([40, 40], 800)


def test_an_integer_in_global_scope_is_slots_in_all():
    assert room(41, "global", EVEN) == ([20, 20], 410)


@pytest.mark.parametrize("slots", [0.25, "0.25", ".25", np.float64(0.25)])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_number_with_a_point_is_a_fraction(slots, scope):
    assert room(slots, scope, EVEN) == ([25, 25], 500)


def test_one_is_one_slot_and_one_point_nought_everything():
    assert room(1, "layer", EVEN) == ([1, 1], 20)
    assert room("1", "layer", EVEN) == ([1, 1], 20)
    assert room(1.0, "layer", EVEN) == ([100, 100], 2000)
    assert room("1.", "global", EVEN) == ([100, 100], 2000)


def test_a_fraction_loses_no_expert_to_rounding():
    one_layer = np.array([100]), np.array([6 * 2**20])
    for hundredths in range(101):
        capacity, total = room(hundredths / 100, "global", one_layer)
        assert capacity == [hundredths]
        assert total // (6 * 2**20) == hundredths


def test_bytes_are_shared_evenly_by_layers_or_pooled():
    assert room("100B", "layer", UNEVEN) == ([3, 1, 0], 100)
    assert room("100B", "global", UNEVEN) == ([3, 1, 0], 100)
    assert room("1GiB", "layer", UNEVEN) == ([8, 6, 4], 80 + 120 + 200)  # no more than there are


def test_layers_with_fewer_experts_have_fewer_slots():
    assert room(5, "layer", UNEVEN) == ([5, 5, 4], 50 + 100 + 200)
    assert room(0.5, "layer", UNEVEN) == ([4, 3, 2], 200)


@pytest.mark.parametrize(
    ("slots", "scope", "message"),
    [
        (101, "layer", "0 to 100 experts of a layer"),
        (201, "global", "0 to 200 experts in all"),
        (-1, "layer", "0 to 100"),
        ("-1", "layer", "no amount of memory"),
        (1.5, "layer", "between 0.0 and 1.0"),
        (float("nan"), "layer", "between 0.0 and 1.0"),
        (True, "layer", "write 40, 0.25 or 8GiB"),
        (None, "layer", "write 40, 0.25 or 8GiB"),
        (".", "layer", "no amount of memory"),
        (1, "both", "'layer' or 'global'"),
    ],
)
def test_what_is_refused(slots, scope, message):
    with pytest.raises(UserError, match=message):
        parse_slots(slots, scope, *EVEN)


def test_slots_in_all_make_no_sense_for_experts_of_several_sizes():
    with pytest.raises(UserError, match=r"differ in size.*0.25.*8GiB"):
        parse_slots(7, "global", *UNEVEN)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lifecycle", "forever", "'request' or 'persistent'"),
        ("staging", -1, "a number >= 0 or 'unbounded'"),
        ("staging", 2.5, "a number >= 0 or 'unbounded'"),
        ("staging", "many", "a number >= 0 or 'unbounded'"),
        ("batch_size", 0, "at least 1"),
    ],
)
def test_settings_that_are_refused(field, value, message):
    with pytest.raises(UserError, match=message):
        Settings(**{field: value})
