"""Hyper-parameters and memory go by name: the order of a part's fields means nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from oled.policies.composition import composition_names, load_composition
from oled.policies.kernel import Memory
from oled.policies.part import Allocation, Dispatch, Part, Prefetch, Retention
from oled.policies.struct import Matrix, Mutable, Struct, Vector

from .test_compositions import run, traces

__all__ = ["traces"]

KINDS = (Retention, Allocation, Dispatch, Prefetch)


def turned(part: Part) -> Part:
    """The same part as a dataclass that lists its fields in the opposite order."""
    fields = dataclasses.fields(part)
    known = {f.name for f in fields} | {"__slots__", "__dict__", "__weakref__", "__doc__"}
    own = {n: v for n, v in vars(type(part)).items() if n not in known and "dataclass" not in n}
    generated = ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__")
    own = {n: v for n, v in own.items() if n not in generated and n != "__match_args__"}
    base = next(kind for kind in KINDS if isinstance(part, kind))
    twin: Any = dataclasses.make_dataclass(
        f"Turned{type(part).__name__}",
        [(f.name, f.type, getattr(part, f.name)) for f in reversed(fields)],
        bases=(base,),
        namespace=own,
        frozen=True,
    )
    assert [f.name for f in dataclasses.fields(twin)] == [f.name for f in reversed(fields)]
    return twin()  # type: ignore[no-any-return]


NAMES = [
    name
    for name in composition_names()
    if any(len(dataclasses.fields(part)) > 1 for part in load_composition(name).parts)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_fields_changes_nothing(name: str, traces: Any) -> None:
    composition = load_composition(name)
    kinds = ("retention", "allocation", "dispatch", "prefetch")
    parts = {kind: turned(getattr(composition, kind)) for kind in kinds}
    assert any(
        part.params().ref is not old.params().ref
        for part, old in zip(parts.values(), composition.parts, strict=True)
    )
    twin = dataclasses.replace(composition, **parts)
    assert run(twin, traces) == run(name, traces)


def test_every_part_with_two_fields_is_turned() -> None:
    turning = {
        type(part)
        for name in NAMES
        for part in load_composition(name).parts
        if len(dataclasses.fields(part)) > 1
    }
    names = {kind.__name__ for kind in turning}
    assert {"Priority", "StateGate", "Coop", "LayerAdapt", "Dial", "Stride"} <= names


class Counts(Memory):
    seen: Matrix[np.float64]
    total: Mutable[float] = 0.0


def test_a_memory_is_one_vector_of_cells() -> None:
    memory = Counts(seen=np.ones((2, 3)))
    memory.total = 4.0
    assert sorted(memory.cells) == [1.0] * 6 + [4.0]
    memory.cells[:] = 0.0
    assert memory.total == 0.0
    assert not memory.seen.any()


class Pair(Struct):
    ids: Vector[np.int64]
    size: int


@pytest.mark.parametrize(
    "ids",
    [np.zeros(3), np.zeros((1, 3), np.int64), np.zeros(6, np.int64)[::2]],
    ids=["dtype", "dimensions", "strides"],
)
def test_an_array_of_another_kind_is_refused(ids: Any) -> None:
    with pytest.raises(TypeError, match="ids"):
        Pair(ids=ids, size=1)


def test_a_fixed_field_cannot_be_set() -> None:
    pair = Pair(ids=np.zeros(2, np.int64), size=1)
    with pytest.raises(AttributeError, match="size"):
        pair.size = 2
