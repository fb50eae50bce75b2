"""docs/metrics.md and metrics.json name the same things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oled import simulate
from oled.sim.drafted import BESIDE_PLAIN
from oled.sim.prepared import PreparedTrace
from oled.trace.drafts import Verifications
from oled.trace.synthetic import LAYERED, synthetic_trace

from .test_metrics import LOAD
from .test_product import GEOMETRY

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
BESIDE = {"phases", "provenance"}


def sections() -> dict[str, set[str]]:
    """The names in the first column of each section's table."""
    found = {}
    for part in PAGE.split("\n## ")[1:]:
        rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
        found[part.splitlines()[0]] = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    return found


@pytest.fixture(scope="module")
def written():
    subject = PreparedTrace.of(synthetic_trace(GEOMETRY, LOAD, LAYERED, seed=1))
    names = set(simulate(subject, "lru", slots=5).metrics)
    names |= set(Verifications(*7 * [1]).metrics()) | set(BESIDE_PLAIN)
    return names | set(simulate(subject, "des_seq", slots=5).metrics)


def test_the_page_names_what_is_written_and_nothing_else(written):
    named = set().union(*sections().values())
    plain = {name.removesuffix("_all") for name in written} - BESIDE
    assert plain - named == set()
    assert named - plain == set()


def test_counts_and_rates_have_a_key_of_all_forwards(written):
    alone = {"decode_h2d_bytes_per_token", "hit_rate_low", "hit_rate_high"}
    page = sections()
    for name in (page["Counts"] | page["Rates"]) - alone:
        assert f"{name}_all" in written, name
    for name in page["Times"] | page["References"] | alone:
        assert f"{name}_all" not in written, name
