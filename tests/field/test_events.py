"""Made-up layer-steps: what is stated comes out, and the spread is that of public counts."""

from __future__ import annotations

import numpy as np
import pytest

from oled.field.events import (
    TOKENS,
    beta_binomial,
    fetch_tables,
    lru_misses,
    quickest_table,
    stated,
)
from oled.field.parts import shape
from oled.field.scenario import Memory


@pytest.mark.parametrize("split", ["table", "admitted"])
@pytest.mark.parametrize(
    ("missing", "copied"), [(60.0, 21.3), (9.5, 9.5), (30.0, 0.0), (143.0, 2.0)]
)
def test_the_sums_are_the_stated_ones(missing, copied, split):
    events = stated(36, 4, missing=missing, copied=copied, background=3.6, ahead=29.0, split=split)
    tolerance = 0.5 / TOKENS
    assert events.copied.sum() / TOKENS == pytest.approx(copied, abs=tolerance)
    assert (events.cpu + events.copied).sum() / TOKENS == pytest.approx(missing, abs=tolerance)
    assert events.background.sum() / TOKENS == pytest.approx(3.6, abs=tolerance)
    assert events.ahead.sum() / TOKENS == pytest.approx(29.0, abs=tolerance)
    assert (events.cpu >= 0).all()
    assert (events.cpu + events.copied <= 4).all()


def test_the_spread_of_misses_is_that_of_the_public_counts():
    """events.csv of the bench, C32: layer-steps a token with 0 to 4 misses."""
    public = np.array([14.88, 11.70, 5.96, 2.58, 0.88]) / 36
    made_up = beta_binomial(4, float(public @ np.arange(5)) / 4, 0.15)
    assert made_up == pytest.approx(public, abs=0.02)


def test_a_table_never_copies_more_than_there_are_misses():
    tables = fetch_tables(4)
    assert (tables <= np.arange(5)).all()
    assert len({tuple(table) for table in tables}) == len(tables) == 16
    assert [0, 1, 1, 2, 3] in tables.tolist()


def test_the_quickest_table_copies_more_over_a_faster_link():
    size = 13_253_760
    slow = quickest_table(Memory(40.0, 5.0, 42.0), size, 8)
    fast = quickest_table(Memory(40.0, 50.0, 70.0), size, 8)
    assert slow.sum() < fast.sum()
    assert slow.tolist()[:3] == [0, 0, 0]


def test_hit_rates_follow_the_public_ones():
    """Qwen3-30B-A3B and gpt-oss-120b, 128 experts a layer; gpt-oss-20b, 32."""
    one, other = shape("Qwen3-30B-A3B").lru, shape("gpt-oss-20b").lru
    assert shape("gpt-oss-120b").lru == one
    for slots, hit in ((8, 0.42), (16, 0.57), (32, 0.76), (64, 0.91)):
        assert 1 - lru_misses(slots / 128, one) == pytest.approx(hit, abs=0.02)
    for slots, hit in ((4, 0.434), (8, 0.649), (16, 0.881)):
        assert 1 - lru_misses(slots / 32, other) == pytest.approx(hit, abs=0.025)
    assert lru_misses(1.0, one) == 0.0
