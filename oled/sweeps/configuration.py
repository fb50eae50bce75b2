"""One point of a sweep: what was given, every value, and what they are called in a table."""

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
from oled.hardware.profile import split_bound
from oled.hardware.runtime import load_runtime
from oled.parallel.system import System, load_system
from oled.parallel.topology import Topology, load_topology
from oled.policies.composition import Composition, load_composition
from oled.policies.files import make_importable
from oled.sim.settings import INPUTS, SETTINGS
from oled.trace.synthetic import Synthetic

KEYS = {one.name: one for one in (*INPUTS, *SETTINGS)}
"""Every key of a simulation by its name on the command line."""
DEFAULTS = {name: one.default for name, one in KEYS.items()}
OPEN = tuple(name for name, one in KEYS.items() if one.is_group)
"""Groups of which single values can be set: `hardware.h2d_pinned=25 GB/s`."""
FILES = ("policy", "hardware", "runtime", "topology")
"""Groups that are files, a mapping each."""
OF_POLICY = ("policy", "calibration")
"""Groups that the references of a result do not depend on."""
OF_MACHINE = ("hardware", "runtime", "cost")
"""Groups that most decisions do not depend on."""
OF_ONE_GPU = (
    "slots",
    "scope",
    "staging",
    "lifecycle",
    "cpu_kernel",
    "pinned",
    "confidence",
    "seed",
)
"""Columns that mean nothing where a topology is given: every expert is on some GPU."""
NOT_OF_RESULT = ("out", "timeline", "window")
"""Values that change no figure."""

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Configuration:
    """Given keys and values, in order, and the values of all keys (groups are mappings)."""

    given: tuple[tuple[str, Any], ...]
    values: Values = dataclasses.field(compare=False, repr=False)
    folders: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # of a user's parts

    @classmethod
    def of(cls, given: Iterable[tuple[str, Any]]) -> Configuration:
        """Resolve keys and values without Hydra; everything else has its default.

        Raises UserError for keys, files and names that do not exist.
        """
        pairs = tuple(given)
        for name, _ in pairs:
            group, dot, _rest = name.partition(".")
            if name not in KEYS and not (dot and group in OPEN):
                raise UserError(f"there is no key '{name}'; {nearest(name, KEYS)}")
        flat = {**DEFAULTS, **dict(pairs)}
        values: dict[str, Any] = {"trace": _trace_of(flat)}
        for group in FILES:
            values[group] = None if flat[group] is None else _mapping(group, flat)
        for name in KEYS:
            outer, dot, leaf = name.partition(".")
            if dot:
                values.setdefault(outer, {})[leaf] = flat[name]
            elif outer not in OPEN:
                values[outer] = flat[name]
        policy = str(flat["policy"])
        is_file = policy.endswith((".yaml", ".yml"))
        return cls(pairs, values, (str(Path(policy).parent),) if is_file else ())

    @property
    def overrides(self) -> str:
        """Return the given keys and values as on the command line."""
        return overrides_text(self.given)

    def value(self, name: str) -> Any:
        """Return the value of a key, such as `cache.slots`."""
        found: Any = self.values
        for word in name.split("."):
            found = found[word]
        return found

    @property
    def trace(self) -> str | Synthetic:
        """Return a bundled name, a folder, or the description of a synthetic trace."""
        return source_of(self.values["trace"])

    @property
    def trace_name(self) -> str:
        trace = self.trace
        return trace.name if isinstance(trace, Synthetic) else trace

    def composition(self) -> Composition:
        self._find_parts()
        return load_composition(self.values["policy"])

    def system(self) -> System:
        """Return the policy where there is a topology: a placement on several GPUs."""
        self._find_parts()
        return load_system(self.values["policy"])

    def _find_parts(self) -> None:
        for folder in self.folders:
            make_importable(Path(folder))

    def topology(self) -> Topology | None:
        """Return the links between GPUs, or None for one GPU."""
        found = self.values["topology"]
        return None if found is None else load_topology(found)

    def hardware(self) -> Profile:
        return load_profile(self.values["hardware"])

    def runtime(self) -> Runtime:
        return load_runtime(self.values["runtime"])

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `Settings`."""
        return {one.field: self.value(one.name) for one in SETTINGS}

    def with_timeline_in(self, folder: Path | None) -> Configuration:
        """Return the same with the timeline, where one is asked for, in a folder of its own."""
        asked = self.values["timeline"]
        if asked is None:
            return self
        file = None if folder is None else str(folder / Path(asked).name)
        return dataclasses.replace(self, values={**self.values, "timeline": file})

    def columns(self) -> dict[str, Any]:
        """Return the columns of a results table that say what was simulated."""
        plain = self.settings()
        plain |= {"slots": str(plain["slots"]), "staging": str(plain["staging"])}
        named = {"trace": self.trace_name} | {
            group: self._name_of(group) for group in ("policy", "hardware", "runtime")
        }
        calibration = self.values["calibration"]
        inner = {
            name: str(value)
            for name, value in self.given
            if "." in name and name.partition(".")[0] in OPEN
        }
        if self.values["topology"] is not None:
            plain = {name: value for name, value in plain.items() if name not in OF_ONE_GPU}
            named["topology"] = self._name_of("topology")
        if calibration is not None:
            named["calibration"] = calibration
        return plain | named | inner

    def _name_of(self, group: str) -> str:
        """Return the name under which an option was given, or its default's."""
        given = str(dict(self.given).get(group, DEFAULTS[group]))
        return Path(given).stem if given.endswith((".yaml", ".yml")) else given

    def digest(self, trace_hash: str) -> str:
        """Return a hash of all that decides the result: values, code, and the trace.

        Raises UserError where policy, machine and topology do not go together.
        """
        several = self.topology() is not None
        parts = (self.system().placement,) if several else self.composition().parts
        machine = [repr(self.hardware()), repr(self.runtime())]
        code = [_code_of(type(part).__module__) for part in parts]
        values = {k: v for k, v in self.values.items() if k not in (*NOT_OF_RESULT, "trace")}
        values |= {"hardware": machine[0], "runtime": machine[1]}
        text = json.dumps([trace_hash, values, _simulator(), code], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def without_policy(self) -> str:
        """Return what is equal for configurations that share their references."""
        return self._without(OF_POLICY)

    def without_machine(self) -> str:
        """Return what is equal for configurations that differ in policies and machines only."""
        return self._without(OF_POLICY + OF_MACHINE)

    def _without(self, groups: tuple[str, ...]) -> str:
        rest = {k: v for k, v in self.values.items() if k not in groups and k != "out"}
        return json.dumps(rest, sort_keys=True, default=str)


def overrides_text(given: Iterable[tuple[str, Any]]) -> str:
    """Return keys and values as on the command line."""
    return " ".join(f"{key}={shlex.quote(str(value))}" for key, value in given)


def source_of(trace: Values) -> str | Synthetic:
    """Return a bundled name, a folder, or the description of a synthetic trace."""
    if "geometry" not in trace:
        return str(trace["path"])
    ours = ("path", "allow_partial")
    return Synthetic(**{key: value for key, value in trace.items() if key not in ours})


def _inside(group: str, flat: Values) -> dict[str, Any]:
    """Return what is set inside a group: `hardware.h2d_pinned` as `h2d_pinned`."""
    return {
        name.removeprefix(f"{group}."): value
        for name, value in flat.items()
        if name.startswith(f"{group}.")
    }


def _trace_of(flat: Values) -> dict[str, Any]:
    fields = _inside("trace", flat)
    trace = {"path": str(flat["trace"]), "allow_partial": fields.pop("allow_partial", False)}
    if trace["path"] != "synthetic":
        if fields:
            raise UserError(f"trace.{next(iter(fields))} is a key of trace=synthetic")
        return trace
    defaults = {field.name: field.default for field in dataclasses.fields(Synthetic)}
    for name in fields:
        if name not in defaults:
            raise UserError(f"there is no key 'trace.{name}'; {nearest(name, defaults)}")
    return trace | defaults | fields


def _mapping(group: str, flat: Values) -> dict[str, Any]:
    """Return the group's file with the given values set in it."""
    source, bound = split_bound(str(flat[group])) if group == "hardware" else (flat[group], "")
    data = dict(_read(group, str(source)))
    if bound:
        data["at"] = bound
    for path, value in _inside(group, flat).items():
        node = data
        *outer, last = path.split(".")
        for word in outer:
            node[word] = dict(node.get(word) or {})
            node = node[word]
        node[last] = value
    return data


@functools.cache
def _simulator() -> str:
    """Return a name for the version of the sources that all configurations share."""
    return cache_dir().name


def _code_of(module: str) -> str:
    """Return a name for the version of the file that a part is in, a user's too."""
    file = inspect.getsourcefile(sys.modules[module])
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.lru_cache(maxsize=256)
def _read(group: str, source: str) -> Values:
    return read_named(group, source)[0]


def product(
    axes: Mapping[str, Any] | Iterable[Mapping[str, Any]], base: Mapping[str, Any] | None = None
) -> list[Configuration]:
    """Return the points of one product of axes, or of several in order, each point once.

    An axis is a list of values; a single value is the same as a list of one. `base` holds what all
    points have.
    """
    products = [axes] if isinstance(axes, Mapping) else list(axes)
    points: dict[str, tuple[tuple[str, Any], ...]] = {}
    for one in products:
        merged = {**(base or {}), **one}
        lists = [value if _is_axis(value) else [value] for value in merged.values()]
        for point in itertools.product(*lists):
            given = tuple(zip(merged, point, strict=True))
            points.setdefault(overrides_text(given), given)
    if not points:
        raise UserError("the sweep has no configuration: an axis is empty")
    return [Configuration.of(given) for given in points.values()]


def _is_axis(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
