"""Hardware profiles: what one GPU with its host costs, each number with its spread and source.

Shipped profiles are `conf/hardware/NAME.yaml`; `conf/hardware/README.md` describes the format. A
mapping, or a Hydra override such as `hardware.h2d_pinned='25 GB/s'`, may replace any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from oled.hardware.files import check_keys, parse_quantity, read_named, shipped
from oled.hardware.quantity import Bound, Dimension, Quantity
from oled.hardware.tables import MeasuredTable

_GROUP = "hardware"


def _number(dimension: Dimension) -> Any:
    return field(metadata={"dimension": dimension})


def _time() -> Any:
    return _number(Dimension.TIME)


def _rate() -> Any:
    return _number(Dimension.RATE)


def _arithmetic() -> Any:
    return _number(Dimension.ARITHMETIC)


def _ratio() -> Any:
    return _number(Dimension.RATIO)


@dataclass(frozen=True, slots=True)
class Profile:
    """One GPU and its host. The words of `reference/hardware.md` section 1, in its order."""

    name: str
    description: str
    gpu: str
    host: str
    dtype: str  # of the weights that the rates were taken with

    # the link
    h2d_pinned: Quantity = _rate()
    d2h_pinned: Quantity = _rate()
    h2d_pageable: Quantity = _rate()
    d2h_pageable: Quantity = _rate()
    copy_isolated: Quantity = _time()  # latency of one pinned copy on an idle link
    copy_queued: Quantity = _time()  # latency of one pinned copy behind another
    copy_pageable: Quantity = _time()  # what a pageable copy adds to the isolated latency
    memcpy_host_call: Quantity = _time()  # host time to issue a copy: no copy takes less

    # the GPU; a group of n experts takes moe_t0 + the larger of reading and arithmetic
    gpu_mem: Quantity = _rate()
    moe_eff: Quantity = _rate()  # rate at which expert weights are read
    moe_t0: Quantity = _time()  # of one launch group
    moe_gemm_share: Quantity = _ratio()  # of bf16_peak that grouped expert GEMMs reach
    bf16_peak: Quantity = _arithmetic()
    dense_layer_mini: Quantity = _time()  # 16 queries over 512-1024 tokens, no routed experts
    dense_layer_flash: Quantity = _time()
    attention_key: Quantity = _time()  # a layer's attention, per key, 4 KV heads of 128
    lm_head_mini: Quantity = _time()
    elementwise: Quantity = _time()  # one small kernel

    # the host
    cpu_stream: Quantity = _rate()
    dram_share: Quantity = _ratio()  # of STREAM that CPU experts and copies reach together
    pageable_dram_passes: Quantity = _ratio()  # DRAM traffic of a pageable copy against a pinned
    cpu_expert_tuned: Quantity = _rate()
    cpu_expert_torch: Quantity = _rate()
    cpu_gemm_tuned: Quantity = _arithmetic()
    cpu_gemm_torch: Quantity = _arithmetic()
    cpu_token_tile: Quantity = _ratio()  # tokens of an expert are padded to this (AMX: 16)
    cpu_call: Quantity = _time()  # dispatch and join of one batch of CPU experts
    act_roundtrip: Quantity = _time()  # activations to the host and back, beyond the bytes

    # measured tables, used where the expert's shape is theirs
    gpu_tables: tuple[MeasuredTable, ...] = ()
    cpu_tables: tuple[MeasuredTable, ...] = ()

    def quantities(self) -> dict[str, Quantity]:
        """All numbers by name, tables apart."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Quantity)}

    def at(self, bound: Bound) -> Self:
        """The profile with each number at its low, high, fast or slow end."""
        ends: dict[str, Any] = {k: q.at(bound) for k, q in self.quantities().items()}
        return replace(
            self,
            name=self.name if bound == "value" else f"{self.name}@{bound}",
            gpu_tables=tuple(table.at(bound) for table in self.gpu_tables),
            cpu_tables=tuple(table.at(bound) for table in self.cpu_tables),
            **ends,
        )

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str) -> Self:
        """Read a profile; `where` (a file, or 'hardware') begins every message."""
        known = {entry.name: entry for entry in fields(cls)}
        check_keys(data, known, optional=("gpu_tables", "cpu_tables", "sources"), where=where)
        values: dict[str, Any] = {}
        for key, entry in known.items():
            if key in ("gpu_tables", "cpu_tables"):
                values[key] = tuple(
                    MeasuredTable.parse(item, f"{where}: {key}[{i}]")
                    for i, item in enumerate(data.get(key) or ())
                )
            elif "dimension" in entry.metadata:
                values[key] = parse_quantity(data[key], f"{where}: {key}", entry.metadata["dimension"])
            else:
                values[key] = str(data[key])
        return cls(**values)


def load_profile(source: str | Path | Mapping[str, Any]) -> Profile:
    """A shipped profile by name, a YAML file by path, or a mapping in the file's form."""
    if isinstance(source, Mapping):
        return Profile.from_mapping(source, _GROUP)
    data, where = read_named(_GROUP, source)
    return Profile.from_mapping(data, where)


def list_profiles() -> list[tuple[str, str]]:
    """(name, one-line description) of the shipped profiles."""
    return [(name, load_profile(name).description) for name in shipped(_GROUP)]
