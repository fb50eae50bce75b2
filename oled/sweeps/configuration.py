"""One point of a sweep: the command line's keys and values, and what they mean to `simulate`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oled._jit import cache_dir
from oled.errors import UserError, nearest
from oled.hardware import Profile, Runtime, load_profile
from oled.hardware.files import read_named
from oled.hardware.quantity import Bound
from oled.hardware.runtime import load_runtime
from oled.parallel.system import System, load_system
from oled.parallel.topology import Topology, load_topology
from oled.policies.composition import Composition, load_composition
from oled.policies.files import make_importable
from oled.sim.settings import Settings
from oled.trace.synthetic import Synthetic

FIELDS = {
    "cache.slots": "slots",
    "cache.scope": "scope",
    "cache.staging": "staging",
    "cache.lifecycle": "lifecycle",
    "workload.batch_size": "batch_size",
    "cost.geometry": "geometry",
    "cost.cpu_kernel": "cpu_kernel",
    "cost.pinned": "pinned",
    "seed": "seed",
}
"""Keys that are fields of `Settings`."""
DEFAULTS: dict[str, Any] = {
    "trace": "demo",
    "policy": "oled_priority",
    "hardware": "rtx5090_xeon8470q",
    "runtime": "graph_fused",
    "topology": None,
    "calibration": None,
} | {key: Settings.__dataclass_fields__[name].default for key, name in FIELDS.items()}
"""Every key with its value where none is given."""
OPEN = ("policy", "hardware", "runtime", "topology", "trace")
"""Groups of which single values can be set: `hardware.h2d_pinned=25 GB/s`."""
BOUNDS: tuple[Bound, ...] = ("low", "high", "fast", "slow")
OF_POLICY = ("policy", "calibration")
"""Groups that the references of a result do not depend on."""
OF_MACHINE = ("hardware", "runtime", "cost")
"""Groups that most decisions do not depend on."""
OF_ONE_GPU = ("slots", "scope", "staging", "lifecycle", "cpu_kernel", "pinned", "seed")
"""Columns that mean nothing where a topology is given: every expert is on some GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Configuration:
    """Given keys and values, in order; everything else has its default."""

    given: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        for key, _ in self.given:
            group, dot, _rest = key.partition(".")
            if key not in DEFAULTS and not (dot and group in OPEN):
                raise UserError(f"there is no key '{key}'; {nearest(key, DEFAULTS)}")

    @property
    def overrides(self) -> str:
        """As on the command line."""
        return " ".join(f"{key}={shlex.quote(str(value))}" for key, value in self.given)

    def value(self, key: str) -> Any:
        return dict(self.given).get(key, DEFAULTS[key])

    def inside(self, group: str) -> dict[str, Any]:
        """What is set inside a group: `hardware.h2d_pinned` as `h2d_pinned`."""
        return {
            key.removeprefix(f"{group}."): value
            for key, value in self.given
            if key.startswith(f"{group}.")
        }

    @property
    def trace(self) -> str | Synthetic:
        """A bundled name, a folder, or the description of a synthetic trace."""
        fields = self.inside("trace")
        if self.value("trace") != "synthetic":
            if fields:
                raise UserError(f"trace.{next(iter(fields))} is a key of trace=synthetic")
            return str(self.value("trace"))
        known = [field.name for field in dataclasses.fields(Synthetic)]
        for key in fields:
            if key not in known:
                raise UserError(f"there is no key 'trace.{key}'; {nearest(key, known)}")
        return Synthetic(**fields)

    @property
    def trace_name(self) -> str:
        trace = self.trace
        return trace.name if isinstance(trace, Synthetic) else trace

    def composition(self) -> Composition:
        return load_composition(self._policy())

    def system(self) -> System:
        """The policy where there is a topology: a placement on several GPUs."""
        return load_system(self._policy())

    def topology(self) -> Topology | None:
        """None: one GPU."""
        name = self.value("topology")
        return None if name is None else load_topology(self._mapping("topology", str(name)))

    def _policy(self) -> dict[str, Any]:
        policy = str(self.value("policy"))
        if policy.endswith((".yaml", ".yml")):
            make_importable(Path(policy).parent)
        return self._mapping("policy", policy)

    def hardware(self) -> Profile:
        """`NAME@slow` is the profile with every number at its slow end (low, high, fast, slow)."""
        name, _, bound = str(self.value("hardware")).partition("@")
        profile = load_profile(self._mapping("hardware", name))
        if not bound:
            return profile
        for known in BOUNDS:
            if bound == known:
                return profile.at(known)
        raise UserError(f"hardware={name}@{bound}: {nearest(bound, BOUNDS)}")

    def runtime(self) -> Runtime:
        return load_runtime(self._mapping("runtime", str(self.value("runtime"))))

    def settings(self) -> dict[str, Any]:
        return {name: self.value(key) for key, name in FIELDS.items()}

    def columns(self) -> dict[str, Any]:
        """The columns of a results table that say what was simulated."""
        plain = self.settings() | {
            "trace": self.trace_name,
            "policy": str(self.value("policy")).removesuffix(".yaml").rpartition("/")[2],
            "slots": str(self.value("cache.slots")),
            "staging": str(self.value("cache.staging")),
            "hardware": self.value("hardware"),
            "runtime": self.value("runtime"),
        }
        inner = {
            key: str(value)
            for key, value in self.given
            if "." in key and key.partition(".")[0] in OPEN
        }
        if self.value("topology") is None:
            return plain | inner
        plain = {key: value for key, value in plain.items() if key not in OF_ONE_GPU}
        return plain | {"topology": self.value("topology")} | inner

    def digest(self, trace_hash: str) -> str:
        """Of all that decides the result: files of the groups, values, code, and the trace."""
        policy = self._mapping("policy", str(self.value("policy")))
        links = self.topology()
        parts = self.composition().parts if links is None else (self.system().placement,)
        code = [_code_of(type(part).__module__) for part in parts]
        topology = None if links is None else self._mapping("topology", self.value("topology"))
        machine = [repr(self.hardware()), repr(self.runtime()), topology]
        groups = [policy, *machine, _simulator(), code]
        values = {key: self.value(key) for key in DEFAULTS}
        text = json.dumps([trace_hash, values, groups], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def without_policy(self) -> tuple[tuple[str, Any], ...]:
        """Equal for configurations that share their references."""
        return self._without(OF_POLICY)

    def without_machine(self) -> tuple[tuple[str, Any], ...]:
        """Equal for configurations that differ in policies and machines only."""
        return self._without(OF_POLICY + OF_MACHINE)

    def _without(self, groups: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
        return tuple(sorted((k, v) for k, v in self.given if k.partition(".")[0] not in groups))

    def _mapping(self, group: str, source: str) -> dict[str, Any]:
        """The group's file with the given values set in it."""
        data = dict(_read(group, source))
        for path, value in self.inside(group).items():
            node = data
            *outer, last = path.split(".")
            for word in outer:
                node[word] = dict(node.get(word) or {})
                node = node[word]
            node[last] = value
        return data


@functools.cache
def _simulator() -> str:
    """Names the version of the sources that all configurations share."""
    return cache_dir().name


def _code_of(module: str) -> str:
    """Names the version of the file that a part is in, a user's too."""
    file = inspect.getsourcefile(sys.modules[module])
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.lru_cache(maxsize=256)
def _read(group: str, source: str) -> Mapping[str, Any]:
    return read_named(group, source)[0]


def product(
    axes: Mapping[str, Any] | Iterable[Mapping[str, Any]], base: Mapping[str, Any] | None = None
) -> list[Configuration]:
    """The points of one product of axes, or of several one after the other, each point once.

    An axis is a list of values; a single value is the same as a list of one. `base` holds what all
    points have.
    """
    products = [axes] if isinstance(axes, Mapping) else list(axes)
    points: dict[Configuration, None] = {}
    for one in products:
        merged = {**(base or {}), **one}
        lists = [value if _is_axis(value) else [value] for value in merged.values()]
        for point in itertools.product(*lists):
            points[Configuration(tuple(zip(merged, point, strict=True)))] = None
    if not points:
        raise UserError("the sweep has no configuration: an axis is empty")
    return list(points)


def _is_axis(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
