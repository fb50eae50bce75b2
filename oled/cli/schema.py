"""Make the classes that Hydra composes against from the keys of the verbs (`oled.cli.keys`).

Typos and wrong types are refused when a configuration is composed. Policies, profiles and presets
are open mappings here: their own loaders check them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from oled.cli.keys import COMPOSED, KEYS
from oled.keys import Key

Mode = Enum("Mode", ["free", "forced"])


@dataclass
class Trace:
    path: str = MISSING
    allow_partial: bool = False  # replay what a crash has left


@dataclass
class Decode:
    kind: str = MISSING
    max_new_tokens: int = MISSING
    eos_ids: list[int] | None = MISSING


@dataclass
class Autoregressive(Decode):
    mode: Mode = MISSING


@dataclass
class BlockDiffusion(Decode):
    mode: Mode = MISSING
    block_length: int | None = MISSING
    threshold: float = MISSING
    tokens_per_forward: int | None = MISSING
    mask_id: int | None = MISSING


@dataclass
class CanvasDiffusion(Decode):
    canvas_length: int | None = MISSING
    max_denoising_steps: int = MISSING
    entropy_bound: float = MISSING
    t_max: float = MISSING
    t_min: float = MISSING
    stability_threshold: int = MISSING
    confidence_threshold: float = MISSING


@dataclass
class Drafting:
    experts: str | None = MISSING
    confidence: float = MISSING
    growth: int = MISSING
    most: int = MISSING


@dataclass
class SpeculativeAutoregressive(Autoregressive):
    draft: Drafting = field(default_factory=Drafting)


@dataclass
class SpeculativeBlocks(BlockDiffusion):
    draft: Drafting = field(default_factory=Drafting)


DECODINGS = {
    "autoregressive": Autoregressive,
    "block_diffusion": BlockDiffusion,
    "canvas_diffusion": CanvasDiffusion,
    "speculative_autoregressive": SpeculativeAutoregressive,
    "speculative_blocks": SpeculativeBlocks,
}
OPEN_TYPES = {"trace": Trace, "decode": Any}
"""Types of groups that are not plain mappings."""


def schema_of(verb: str, keys: tuple[Key, ...]) -> type:
    """Return the class of a verb's configuration, with a defaults list for its groups.

    `cache.slots` is the field `slots` of a class of its own for `cache`.
    """
    inner: dict[str, list[Key]] = {}
    for one in keys:
        if "." in one.name:
            inner.setdefault(one.name.partition(".")[0], []).append(one)
    groups = {name: _class(name, part) for name, part in inner.items()}
    chosen: list[Any] = [{one.name: one.default} for one in keys if one.is_group]
    chosen += [{name: "default"} for name in CLOSED if name in groups]
    fields: list[Any] = [
        ("defaults", list[Any], field(default_factory=lambda: ["_self_", *chosen])),
        ("out", str, MISSING),
    ]
    for name, made in groups.items():
        fields.append((name, made, field(default_factory=made)))
    for one in keys:
        if "." not in one.name and one.name not in groups:
            fields.append(_group(one) if one.is_group else (one.name, *_type_and_default(one)))
    return dataclasses.make_dataclass(verb.capitalize(), fields)


CLOSED = ("cache", "cost", "workload")
"""Groups whose keys are all declared; `default` is an option of each."""


def _class(name: str, keys: list[Key]) -> type:
    fields: list[Any] = [(one.name.rpartition(".")[2], *_type_and_default(one)) for one in keys]
    return dataclasses.make_dataclass(name.capitalize(), fields)


def _group(one: Key) -> tuple[str, Any, Any]:
    kind = OPEN_TYPES.get(one.name, dict[str, Any])
    if type(None) in one.types:
        return one.name, Optional[kind], None  # noqa: UP045 (made while running)
    if kind is Any:
        return one.name, Any, MISSING
    return one.name, kind, field(default_factory=Trace if kind is Trace else dict)


def _type_and_default(one: Key) -> tuple[Any, Any]:
    """Return the type that OmegaConf knows, and the default as a value of it."""
    if one.choices and not one.types:
        choices = Enum(one.field, list(one.choices))  # type: ignore[misc]
        return choices, choices[one.default]
    several = [kind for kind in one.types if kind is not type(None)]
    if len(several) + bool(one.choices) > 1 or (
        one.default is None and type(None) not in one.types
    ):
        return Any, one.default
    return one.annotation, one.default


def synthetic_schema() -> type:
    """Return the class of `trace=synthetic`: the fields of `Synthetic`."""
    from oled.trace.synthetic import Synthetic

    types = {"int": int, "str": str}
    fields: list[Any] = [
        (one.name, types[str(one.type)], one.default) for one in dataclasses.fields(Synthetic)
    ]
    return dataclasses.make_dataclass("SyntheticTrace", fields, bases=(Trace,))


def register() -> None:
    """Tell Hydra the classes, under the names that conf/ refers to."""
    store = ConfigStore.instance().store
    for verb in COMPOSED:
        store(name=f"{verb}_schema", node=schema_of(verb, KEYS[verb]))
    for group in CLOSED:
        store(group=group, name="default", node={})
    store(group="trace", name="synthetic_schema", node=synthetic_schema())
    for name, node in DECODINGS.items():
        store(group="decode", name=f"{name}_schema", node=node)
