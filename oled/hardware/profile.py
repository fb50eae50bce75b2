"""Hardware profiles: what one GPU with its host costs, each number with its spread and source.

Shipped profiles are `conf/hardware/NAME.yaml`; `conf/hardware/README.md` describes the format. A
mapping, or a Hydra override such as `hardware.h2d_pinned='25 GB/s'`, may replace any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Self, get_origin, get_type_hints

from oled.errors import UserError, nearest
from oled.hardware.files import check_keys, parse_quantity, read_named, shipped
from oled.hardware.quantity import Bound, Dimension, Quantity
from oled.hardware.tables import MeasuredTable

_GROUP = "hardware"


Time = Annotated[Quantity, Dimension.TIME]
Rate = Annotated[Quantity, Dimension.RATE]
Arithmetic = Annotated[Quantity, Dimension.ARITHMETIC]
Ratio = Annotated[Quantity, Dimension.RATIO]
Count = Annotated[Quantity, Dimension.COUNT]


_BESIDE = ("sources", "machine", "measurements", "absent")
"""What a file may hold for its readers: no costs are computed from it."""

BOUNDS: tuple[Bound, ...] = ("low", "high", "fast", "slow")

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Profile:
    """One GPU and its host. The words of `reference/hardware.md` section 1, in its order."""

    name: str
    description: str
    gpu: str
    host: str
    dtype: str  # of the weights that the rates were taken with

    # the link
    h2d_pinned: Rate
    d2h_pinned: Rate
    h2d_pageable: Rate
    d2h_pageable: Rate
    copy_isolated: Time  # latency of one pinned copy on an idle link
    copy_queued: Time  # latency of one pinned copy behind another
    copy_pageable: Time  # what a pageable copy adds to the isolated latency
    memcpy_host_call: Time  # host time to issue a copy: no copy takes less

    # the GPU; a group of n experts takes moe_t0 + the larger of reading and arithmetic
    gpu_mem: Rate
    moe_eff: Rate  # rate at which expert weights are read
    moe_t0: Time  # of one launch group
    moe_gemm_share: Ratio  # of bf16_peak that grouped expert GEMMs reach
    bf16_peak: Arithmetic
    dense_layer_mini: Time  # 16 queries over 512-1024 tokens, no routed experts
    dense_layer_flash: Time
    attention_key: Time  # a layer's attention, per key, 4 KV heads of 128
    lm_head_mini: Time
    elementwise: Time  # one small kernel

    # the host
    cpu_stream: Rate
    dram_share: Ratio  # of STREAM that CPU experts and copies reach together
    pageable_dram_passes: Count  # DRAM traffic of a pageable copy against a pinned
    cpu_expert_tuned: Rate
    cpu_expert_torch: Rate
    cpu_gemm_tuned: Arithmetic
    cpu_gemm_torch: Arithmetic
    cpu_token_tile: Count  # tokens of an expert are padded to this (AMX: 16)
    cpu_call: Time  # dispatch and join of one batch of CPU experts
    act_roundtrip: Time  # activations to the host and back, beyond the bytes

    # measured tables, used where the expert's shape is theirs
    gpu_tables: tuple[MeasuredTable, ...] = ()
    cpu_tables: tuple[MeasuredTable, ...] = ()

    device: str = ""  # on which it was measured, as its driver says; nothing: on none as a whole
    whole: Profile | None = None  # whose end this is, see `at`

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UserError(
                f"hardware '{self.name}': dtype '{self.dtype}'; {nearest(self.dtype, DTYPE_BYTES)}"
            )
        for name, quantity in self.quantities().items():
            if quantity.low == 0 and quantity.dimension is not Dimension.TIME:
                raise UserError(
                    f"hardware '{self.name}': {name} has low 0 {quantity.unit}; nothing would end"
                )

    def quantities(self) -> dict[str, Quantity]:
        """All numbers by name, tables apart."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    def scaled(self, name: str, factor: float) -> Self:
        """Return the profile with one number, at both its ends, times `factor`."""
        quantity = self.quantities()[name]
        value = factor * quantity.value
        change: dict[str, Any] = {name: replace(quantity, value=value, low=value, high=value)}
        return replace(self, **change)

    def at(self, bound: Bound) -> Self:
        """The profile with each number at its low, high, fast or slow end.

        It remembers the whole one: what is computed as a difference of two numbers, such as the
        constant of `formulas.dense_layer`, cannot be told from ends that need not occur together.
        """
        ends: dict[str, Any] = {k: q.at(bound) for k, q in self.quantities().items()}
        return replace(
            self,
            name=self.name if bound == "value" else f"{self.name}@{bound}",
            gpu_tables=tuple(table.at(bound) for table in self.gpu_tables),
            cpu_tables=tuple(table.at(bound) for table in self.cpu_tables),
            whole=self.whole or self,
            **ends,
        )

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str) -> Self:
        """Read a profile; `where` (a file, or 'hardware') begins every message."""
        names = [entry.name for entry in fields(cls) if entry.name != "whole"]
        tables = ("gpu_tables", "cpu_tables")
        optional = (*tables, "device", *_BESIDE)
        check_keys(data, names, optional=optional, where=where)
        values: dict[str, Any] = {}
        for name in names:
            if name in tables:
                values[name] = tuple(
                    MeasuredTable.parse(item, f"{where}: {name}[{i}]")
                    for i, item in enumerate(data.get(name) or ())
                )
            elif name in DIMENSIONS:
                values[name] = parse_quantity(data[name], f"{where}: {name}", DIMENSIONS[name])
            else:
                values[name] = str(data.get(name) or "")
        return cls(**values)


DIMENSIONS: dict[str, Dimension] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Profile, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""What each number of a profile counts."""


def load_profile(source: str | Path | Mapping[str, Any]) -> Profile:
    """Return a shipped profile by name, one of a YAML file by path, or of a mapping in its form.

    `NAME@slow` is the profile with every number at its slow end (low, high, fast, slow), as is a
    mapping with `at: slow`.
    """
    name, bound = split_bound(str(source)) if isinstance(source, str) else (source, "")
    data, where = (name, _GROUP) if isinstance(name, Mapping) else read_named(_GROUP, name)
    profile = Profile.from_mapping({k: v for k, v in data.items() if k != "at"}, where)
    end = str(bound or data.get("at") or "value")
    for known in (*BOUNDS, "value"):
        if end == known:
            return profile.at(known) if end != "value" else profile
    raise UserError(f"hardware={profile.name}@{end}: {nearest(end, BOUNDS)}")


def split_bound(source: str) -> tuple[str, str]:
    """Return a profile's name and the end that follows an @, or no end."""
    name, at, bound = source.rpartition("@")
    return (name, bound) if at and "/" not in bound else (source, "")


def list_profiles() -> list[tuple[str, str]]:
    """(name, one-line description) of the shipped profiles."""
    return [(name, load_profile(name).description) for name in shipped(_GROUP)]
