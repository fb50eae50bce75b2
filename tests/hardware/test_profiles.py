"""Shipped profiles and presets are complete; wrong ones are refused in one line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from hardware.shapes import MINI, PROFILES, RUNTIMES, profile_data, table
from oled.errors import UserError
from oled.hardware import (
    Profile,
    describe,
    list_profiles,
    list_runtimes,
    load_profile,
    load_runtime,
)
from oled.hardware.profile import DIMENSIONS
from oled.hardware.quantity import UNITS, Tag
from oled.paths import conf_dir

PAIRS = {
    "rtx5090_xeon8470q",
    "rtx5090_xeon8470q_25cpu",
    "a100_pcie",
    "rtx4090_desktop",
    "h100_sxm",
    "h100_pcie",
    "h200",
    "rtx_pro_6000",
    "laptop_x8",
    "rtx3090",
}


def numbers(group: str, name: str) -> dict[str, dict[str, Any]]:
    data = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
    skip = ("sources", "gpu_tables", "cpu_tables")
    return {k: v for k, v in data.items() if isinstance(v, dict) and k not in skip}


def test_the_ten_pairs_are_shipped() -> None:
    assert set(PROFILES) >= PAIRS
    assert [name for name, _ in list_profiles()] == PROFILES
    assert [name for name, _ in list_runtimes()] == RUNTIMES
    assert all(text and "\n" not in text for _, text in list_profiles() + list_runtimes())


@pytest.mark.parametrize(
    ("group", "name"),
    [("hardware", name) for name in PROFILES] + [("runtime", name) for name in RUNTIMES],
)
def test_every_number_has_spread_unit_tag_and_source(group: str, name: str) -> None:
    for field, number in numbers(group, name).items():
        assert set(number) == {"value", "low", "high", "unit", "tag", "source"}, field
        assert number["low"] <= number["value"] <= number["high"], field
        assert number["unit"] in UNITS, field
        assert number["tag"] in set(Tag), field
        assert number["source"].strip(), field


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_file_holds_every_number_and_its_own_name(name: str) -> None:
    assert set(numbers("hardware", name)) == set(DIMENSIONS)
    profile = load_profile(name)
    assert profile.name == name
    assert profile.moe_eff.base <= profile.gpu_mem.base
    assert profile.copy_queued.base <= profile.copy_isolated.base


NOTES = Path(__file__).parents[3] / "shared/data/hardware/public/profiles.csv"
TAGS = {"M": "measured", "V": "vendor", "D": "derived", "A": "assumed"}
IN_NOTES = {
    "rtx5090+xeon8470q_socket": "rtx5090_xeon8470q",
    "rtx5090+xeon8470q_25cpu_container": "rtx5090_xeon8470q_25cpu",
    "a100_pcie80+milan_or_icelake": "a100_pcie",
    "rtx4090+desktop_ddr5": "rtx4090_desktop",
    "h100_sxm+spr": "h100_sxm",
    "h100_pcie+spr": "h100_pcie",
    "h200_sxm+spr_or_emr": "h200",
    "rtx_pro_6000+server": "rtx_pro_6000",
    "laptop_rtx4060_4070+ddr5": "laptop_x8",
    "rtx3090+epyc_or_desktop": "rtx3090",
}
FITS = ("moe_eff", "moe_t0")  # the notes call fits of measured tables measured


@pytest.mark.skipif(not NOTES.exists(), reason=f"no {NOTES}: the public data are not here")
def test_the_pairs_hold_the_numbers_of_the_notes() -> None:
    """Value, spread and unit; of two tags in the notes the weaker one."""
    lines = [line for line in NOTES.read_text().splitlines() if not line.startswith("#")]
    seen = set()
    for row in csv.DictReader(lines):
        name = IN_NOTES[row["pair"]]
        seen.add(name)
        number = numbers("hardware", name)[row["field"]]
        assert [float(row[k]) for k in ("value", "low", "high")] == [
            number[k] for k in ("value", "low", "high")
        ], (name, row["field"])
        assert row["unit"] == number["unit"], (name, row["field"])
        tag = TAGS[row["tag"][-1]]
        fit = row["field"] in FITS and tag == "measured"
        assert number["tag"] == ("derived" if fit else tag), (name, row["field"])
    assert seen == PAIRS


@pytest.mark.parametrize("bound", ["low", "high", "fast", "slow"])
def test_a_bound_fixes_every_number_at_one_end(bound: Any) -> None:
    profile = load_profile("rtx3090")
    fixed = profile.at(bound)
    assert fixed.name == f"rtx3090@{bound}"
    for name, end in fixed.quantities().items():
        number = profile.quantities()[name]
        assert end.low == end.value == end.high
        assert end.value in (number.low, number.high)
    assert profile.at("value").quantities()["cpu_call"].value == profile.cpu_call.value


def test_fast_means_high_rates_and_low_times() -> None:
    profile = load_profile("rtx3090")
    fast, slow = profile.at("fast"), profile.at("slow")
    assert fast.h2d_pinned.value == profile.h2d_pinned.high
    assert fast.cpu_call.value == profile.cpu_call.low
    assert fast.pageable_dram_passes.value == profile.pageable_dram_passes.low
    assert slow.moe_eff.value == profile.moe_eff.low
    assert slow.cpu_token_tile.value == profile.cpu_token_tile.high


def test_a_number_may_be_set_by_a_text() -> None:
    profile = load_profile(profile_data() | {"h2d_pinned": "12.3 GB/s"})
    assert profile.h2d_pinned.base == 12.3e9
    assert profile.h2d_pinned.low == profile.h2d_pinned.high == 12.3
    assert profile.h2d_pinned.source == "set by the user"


def test_a_profile_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(profile_data() | {"name": "mine"}))
    assert load_profile(file) == load_profile(str(file))
    assert load_profile(file).name == "mine"


NUMBER = {"value": 9, "low": 9, "high": 9, "unit": "us", "tag": "measured", "source": "me"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"h2d_pined": "1 GB/s"}, ["h2d_pined", "did you mean 'h2d_pinned'"]),
        ({"cpu_call": NUMBER | {"low": 10}}, ["cpu_call", "low 10, value 9", "'9 us'"]),
        ({"cpu_call": NUMBER | {"low": -1}}, ["cpu_call", "low -1"]),
        ({"cpu_call": NUMBER | {"high": float("inf")}}, ["cpu_call", "high inf"]),
        ({"cpu_call": NUMBER | {"value": "9"}}, ["cpu_call", "'value' is '9'"]),
        ({"cpu_call": NUMBER | {"value": True}}, ["cpu_call", "'value' is True"]),
        ({"cpu_call": NUMBER | {"tag": "guess"}}, ["cpu_call", "guess", "assumed"]),
        ({"cpu_call": NUMBER | {"source": ""}}, ["cpu_call", "source"]),
        ({"cpu_call": NUMBER | {"unit": "h"}}, ["cpu_call", "'h'", "us"]),
        ({"cpu_call": NUMBER | {"comment": "x"}}, ["cpu_call", "comment"]),
        ({"cpu_call": {"value": 9}}, ["cpu_call", "'low' is missing"]),
        ({"cpu_call": 9}, ["cpu_call", "is 9", "'25 GB/s'"]),
        ({"cpu_call": "nine us"}, ["cpu_call", "nine us"]),
        ({"cpu_call": "9 GB/s"}, ["cpu_call", "GB/s", "ns or us or ms"]),
        ({"cpu_call": "9"}, ["cpu_call", "unit '1'", "us"]),
        ({"moe_eff": "0 GB/s"}, ["moe_eff", "low 0"]),
        ({"dtype": "bf16"}, ["bf16", "did you mean 'bfloat16'"]),
        ({"gpu_tables": [{"tokens": [1]}]}, ["gpu_tables[0]", "time"]),
        ({"gpu_tables": [table(9, [[1]], tokens=[1], active=[1], colour=1)]}, ["colour"]),
        ({"gpu_tables": [table(9, [[1, 2]], tokens=[2, 1])]}, ["tokens is [2, 1]", "ascend"]),
        ({"gpu_tables": [table(9, [[1]], tokens=[0])]}, ["tokens holds 0", "1 or more"]),
        ({"cpu_tables": [table("big", [1], tokens=[1])]}, ["expert_bytes holds 'big'"]),
        ({"gpu_tables": [table(9, [1, 2, 3], tokens=[1, 2])]}, ["time.value", "2 x 1"]),
        ({"gpu_tables": [table(9, [1, -2], tokens=[1, 2])]}, ["time.value", "-2", "positive"]),
        ({"gpu_tables": [table(9, [1, None], tokens=[1, 2])]}, ["most tokens", "complete"]),
    ],
)
def test_a_wrong_field_is_named_with_its_value(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        load_profile(profile_data() | change)
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith("hardware")
    for word in words:
        assert word in message


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    data = profile_data()
    del data["moe_t0"]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(UserError, match=r"mine\.yaml: field 'moe_t0' is missing"):
        load_profile(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: [", "not readable as YAML"), ("- 1", "holds list"), ("\xff", "not readable")],
)
def test_a_file_that_is_no_profile(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=words) as refusal:
        load_profile(file)
    assert "mine.yaml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("load", "name", "words"),
    [
        (load_profile, "rtx309", "did you mean 'rtx3090'"),
        (load_profile, "cray", "known: a100_pcie"),
        (load_profile, "no/such.yaml", "no/such.yaml: no such hardware file"),
        (load_runtime, "expert_lop", "did you mean 'expert_loop'"),
    ],
)
def test_an_unknown_name_lists_the_nearest(load: Any, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(name)


def test_runtime_presets() -> None:
    assert load_runtime("graph_fused").per_layer_ns == 0
    eager = load_runtime("eager_fused")
    assert [eager.at(b).per_layer_ns for b in ("low", "value", "high")] == [300e3, 500e3, 700e3]
    loop = load_runtime("expert_loop")
    assert (loop.per_layer_ns, loop.per_active_expert_ns) == (300_000, 55_000)
    assert loop.policy_ns_per_layer == 194_000
    assert eager.policy_ns_per_layer == 0


@pytest.mark.parametrize("name", PROFILES)
def test_the_description_says_every_number_and_the_crossover(name: str) -> None:
    profile: Profile = load_profile(name)
    text = describe(profile, MINI)
    for field in DIMENSIONS:
        assert field in text
    verdict = "never" if name == "emulated" else "up to"  # its copies are copies in memory
    assert f"is faster on the CPU than as a pinned copy {verdict}" in text
    assert text.endswith("(PyTorch)")
