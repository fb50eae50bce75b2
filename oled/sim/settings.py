"""Declare what a simulation is told: every key of `oled simulate` is a field of these two classes.

A key is added here, in one place, beside the code that uses it: the schema, the help, the check of
its value, the argument of `simulate` and the column of results tables follow (`oled.keys`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from oled.keys import Key, key, keys_of


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Cache, costs and workload. The fields are arguments of `oled.simulate` and columns."""

    slots: int | float | str = key(
        40,
        "of a layer (scope global: of the model), a fraction of all experts' bytes, or bytes",
        name="cache.slots",
        shown="40|0.25|8GiB",
    )
    scope: Literal["layer", "global"] = key("layer", "which slots compete", name="cache.scope")
    staging: int | Literal["unbounded"] = key(
        8,
        "slots that transfers land in, one pool",
        name="cache.staging",
        shown="8|unbounded",
        least=0,
    )
    lifecycle: Literal["request", "persistent"] = key(
        "request", "request: every request starts afresh", name="cache.lifecycle"
    )
    batch_size: int = key(1, "requests in lockstep", name="workload.batch_size", least=1)
    geometry: str | None = key(
        None, "take bytes and times of another model", name="cost.geometry", shown="NAME[@FORMAT]"
    )
    cpu_kernel: Literal["tuned", "torch"] = key(
        "tuned", "which code computes experts on the CPU", name="cost.cpu_kernel"
    )
    pinned: bool = key(True, "copies come from pinned host memory", name="cost.pinned")
    confidence: Literal["previous", "own"] = key(
        "previous", "whose token confidences policies see: the forward before, or its own"
    )
    seed: int = key(0, "of the resampling behind intervals")
    timeline: tuple[int, int] | None = None  # (first forward, number of forwards) to record
    references: bool = True
    plans: bool = False  # keep the plan log

    def __post_init__(self) -> None:
        for one in SETTINGS:
            one.check(getattr(self, one.field))

    @property
    def unbounded(self) -> bool:
        """Return whether transfers never wait for a slot (an accounting replay)."""
        return self.staging == "unbounded"

    @property
    def staging_slots(self) -> int:
        return 0 if self.staging == "unbounded" else self.staging


SETTINGS: tuple[Key, ...] = keys_of(Settings)


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What is simulated, on which machine, and what else is written."""

    trace: dict[str, Any] = key(
        "demo",
        "a bundled trace, a folder, a made-up one (trace.geometry=…)",
        shown="NAME|DIR|synthetic",
        group=True,
    )
    policy: dict[str, Any] = key(
        "oled_priority",
        "and any part of it, as policy.retention.smoothing=0.5",
        shown="NAME|FILE.yaml",
        group=True,
    )
    hardware: dict[str, Any] = key(
        "rtx5090_xeon8470q",
        "and any number of it, as hardware.h2d_pinned='25 GB/s'; NAME@slow: its slow end "
        "(fast, low, high)",
        shown="NAME|FILE.yaml",
        group=True,
    )
    runtime: dict[str, Any] = key(
        "graph_fused", "what the software adds", shown="NAME|FILE.yaml", group=True
    )
    topology: dict[str, Any] | None = key(
        None,
        "several GPUs, for policy=static_ep|eplb|epic",
        shown="NAME|FILE.yaml",
        group=True,
    )
    calibration: str | None = key(
        None, "another trace, for policies that learn beforehand", shown="NAME|DIR"
    )
    stages: str | None = key(
        None,
        "cues that divide autoregressive text, for policy=saem",
        name="workload.stages",
        shown="FILE|learned",
    )
    timeline: str | None = key(None, "opens in Perfetto", shown="FILE.json.gz")
    window: list[int] | None = key(
        None, "the timeline's forwards; default: the first block", shown="[first,count]"
    )


INPUTS: tuple[Key, ...] = keys_of(Inputs)
