"""Every configuration file composes, and every option becomes what it describes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from oled.cli import jobs, schema
from oled.cli.keys import COMPOSED, KEYS
from oled.hardware.profile import load_profile
from oled.hardware.runtime import load_runtime
from oled.parallel.system import load_system
from oled.parallel.topology import load_topology
from oled.paths import bundled_traces, conf_dir, trace_path
from oled.policies.composition import load_composition
from oled.policies.files import placement_names
from oled.sim.api import simulate
from oled.sim.settings import INPUTS

VERB_OF = {
    "trace": "simulate",
    "policy": "simulate",
    "hardware": "simulate",
    "runtime": "simulate",
    "cache": "simulate",
    "topology": "simulate",
    "experiment": "simulate",
    "model": "record",
    "decode": "record",
}
OPTIONS = [
    (group, file.stem) for group in VERB_OF for file in sorted((conf_dir() / group).glob("*.yaml"))
]


@pytest.fixture(autouse=True, scope="module")
def hydra() -> Iterator[None]:
    schema.register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


@functools.cache
def composed(verb: str, *overrides: str):
    """Return the configuration as plain data; each is composed once, which takes 0.3 s."""
    return OmegaConf.to_container(compose(verb, list(overrides)), enum_to_str=True)


def test_no_group_is_forgotten():
    groups = {file.parent.name for file in conf_dir().glob("*/*.yaml")}
    assert groups == set(VERB_OF)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group, option):
    config = composed(VERB_OF[group], f"{group}={option}")
    assert group == "experiment" or config[group]


@pytest.mark.parametrize("verb", ["simulate", "record", "quality", "paths", "run", "validate"])
def test_defaults_compose(verb):
    assert composed(verb)["seed"] == 0


def leaves(node, prefix=""):
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")


@pytest.mark.parametrize("verb", COMPOSED)
def test_every_key_of_a_verb_composes_with_its_default(verb):
    config = composed(verb)
    names = {*leaves(config)}
    for one in KEYS[verb]:
        assert one.name in names
        value = config
        for word in one.name.split("."):
            value = value[word]
        if not one.is_group and one.name != "model.path":
            assert value == one.default, one.name
    assert {name.partition(".")[0] for name in names} == {
        "out", *(one.name.partition(".")[0] for one in KEYS[verb])
    }  # fmt: skip


def test_python_s_defaults_are_those_of_the_keys():
    arguments = inspect.signature(simulate).parameters
    for one in INPUTS:
        if one.name in arguments:
            assert arguments[one.name].default == one.default


@pytest.mark.parametrize("name", [option for group, option in OPTIONS if group == "policy"])
def test_every_policy_loads_by_name_and_as_composed(name):
    mapping = composed("simulate", f"policy={name}")["policy"]
    load = load_system if name in placement_names() else load_composition
    assert load(mapping).name == load(name).name == name


@pytest.mark.parametrize("name", [option for group, option in OPTIONS if group == "topology"])
def test_every_topology_loads_as_composed(name):
    mapping = composed("simulate", f"topology={name}")["topology"]
    one, other = load_topology(mapping), load_topology(name)
    assert one.name == other.name == name
    assert (one.ns_per_byte == other.ns_per_byte).all()


@pytest.mark.parametrize("name", [option for group, option in OPTIONS if group == "hardware"])
def test_every_profile_loads_as_composed(name):
    composed_profile = load_profile(composed("simulate", f"hardware={name}")["hardware"])
    profile = load_profile(name)
    assert composed_profile.quantities() == profile.quantities()
    for kind in ("gpu_tables", "cpu_tables"):
        pairs = zip(getattr(composed_profile, kind), getattr(profile, kind), strict=True)
        assert all(np.array_equal(a.value, b.value, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize("name", [option for group, option in OPTIONS if group == "runtime"])
def test_every_runtime_loads_as_composed(name):
    assert load_runtime(composed("simulate", f"runtime={name}")["runtime"]) == load_runtime(name)


@pytest.mark.parametrize("name", [option for group, option in OPTIONS if group == "decode"])
def test_every_decoding_is_instantiated(name):
    settings = jobs.decoding(composed("record", f"decode={name}")["decode"])
    assert settings == type(settings)()


@pytest.mark.parametrize("name", bundled_traces())
def test_bundled_traces_are_options(name):
    assert (
        trace_path(composed("simulate", f"trace={name}")["trace"]["path"]) / "trace.json"
    ).is_file()


def test_one_number_of_a_profile_can_be_replaced():
    config = composed("simulate", "hardware.h2d_pinned='25 GB/s'")
    assert load_profile(config["hardware"]).h2d_pinned.value == 25.0
