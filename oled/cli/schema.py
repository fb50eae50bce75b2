"""What the runs' configurations hold, and of what type: typos and wrong types die at compose time.

The YAML files in conf/ are merged into these classes. Policies, profiles and presets are open
mappings here: their own loaders check them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

Scope = Enum("Scope", ["layer", "global"])
Lifecycle = Enum("Lifecycle", ["request", "persistent"])
CpuKernel = Enum("CpuKernel", ["tuned", "torch"])
Mode = Enum("Mode", ["free", "forced"])


@dataclass
class Trace:
    path: str = MISSING
    allow_partial: bool = False  # replay what a crash has left


@dataclass
class SyntheticTrace(Trace):
    geometry: str = MISSING
    block_length: int = MISSING
    requests: int = MISSING
    process: str = MISSING
    workload: str = MISSING
    decoding: str = MISSING
    seed: int = MISSING
    model_seed: int = MISSING
    horizons: int = MISSING
    scores: int = MISSING


@dataclass
class Cache:
    slots: Any = MISSING  # 40 slots, 0.25 of all bytes, 8GiB
    scope: Scope = MISSING
    staging: Any = MISSING  # slots, or "unbounded"
    lifecycle: Lifecycle = MISSING


@dataclass
class Cost:
    geometry: str | None = MISSING
    cpu_kernel: CpuKernel = MISSING
    pinned: bool = MISSING


@dataclass
class Workload:
    batch_size: int = MISSING
    stages: str | None = MISSING


@dataclass
class Simulate:
    """`oled simulate`."""

    out: str = MISSING
    trace: Trace = field(default_factory=Trace)
    policy: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    cache: Cache = field(default_factory=Cache)
    workload: Workload = field(default_factory=Workload)
    topology: dict[str, Any] | None = None
    cost: Cost = field(default_factory=Cost)
    calibration: str | None = MISSING
    seed: int = MISSING
    timeline: str | None = MISSING
    window: list[int] | None = MISSING


@dataclass
class Model:
    path: str = MISSING
    revision: str | None = MISSING
    trust_remote_code: bool = MISSING
    dtype: str = MISSING
    device: str = MISSING


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


@dataclass
class Record:
    """`oled record`."""

    out: str = MISSING
    model: Model = field(default_factory=Model)
    decode: Any = MISSING
    policy: dict[str, Any] | None = None
    prompts: str = MISSING
    skip: int = MISSING
    limit: int | None = MISSING
    batch_size: int = MISSING
    chat: bool | None = MISSING
    horizons: int = MISSING
    score_width: int = MISSING
    heads: str | None = MISSING
    seed: int = MISSING


@dataclass
class Quality:
    """`oled quality`."""

    out: str = MISSING
    model: Model = field(default_factory=Model)
    decode: Any = MISSING
    policy: dict[str, Any] | None = None
    paths: str | None = MISSING
    prompts: str | None = MISSING
    skip: int = MISSING
    limit: int | None = MISSING
    chat: bool | None = MISSING
    free: bool = MISSING
    seed: int = MISSING


@dataclass
class Learn:
    prompts: str | None = MISSING
    skip: int = MISSING
    limit: int | None = MISSING


@dataclass
class Paths:
    """`oled paths`."""

    out: str = MISSING
    model: Model = field(default_factory=Model)
    decode: Any = MISSING
    trace: Trace | None = None
    learn: Learn = field(default_factory=Learn)
    tolerance: float = MISSING
    prompts: str | None = MISSING
    skip: int = MISSING
    limit: int | None = MISSING
    chat: bool | None = MISSING
    free: bool = MISSING
    share: float = MISSING
    seed: int = MISSING


@dataclass
class Lockstep:
    """The workload of a trace that runs live."""

    batch_size: int = MISSING


@dataclass
class Run:
    """`oled run`."""

    out: str = MISSING
    model: Model = field(default_factory=Model)
    decode: Any = MISSING
    trace: Trace | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    cache: Cache = field(default_factory=Cache)
    workload: Lockstep = field(default_factory=Lockstep)
    cost: Cost = field(default_factory=Cost)
    backend: str = MISSING
    link: str = MISSING
    expert_file: str | None = MISSING
    paced: bool = MISSING
    prompts: str | None = MISSING
    skip: int = MISSING
    limit: int | None = MISSING
    forwards: int | None = MISSING
    calibration: str | None = MISSING
    heads: str | None = MISSING
    quality: bool = MISSING
    seed: int = MISSING
    timeline: str | None = MISSING


@dataclass
class PaceKeys:
    dilation: float = MISSING
    kept: bool = MISSING


Preset = Enum("Preset", ["short", "full"])


@dataclass
class Validate:
    """`oled validate`."""

    out: str = MISSING
    trace: Trace = field(default_factory=Trace)
    hardware: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    cache: Cache = field(default_factory=Cache)
    workload: Lockstep = field(default_factory=Lockstep)
    cost: Cost = field(default_factory=Cost)
    preset: Preset = MISSING
    policies: list[str] | None = MISSING
    backend: str = MISSING
    link: str = MISSING
    expert_file: str | None = MISSING
    pace: PaceKeys = field(default_factory=PaceKeys)
    gated: bool = MISSING
    repeats: int = MISSING
    forwards: int | None = MISSING
    calibration: str | None = MISSING
    seed: int = MISSING


def register() -> None:
    """Makes the classes known to Hydra under the names that conf/ refers to."""
    store = ConfigStore.instance().store
    store(name="simulate_schema", node=Simulate)
    store(name="record_schema", node=Record)
    store(name="quality_schema", node=Quality)
    store(name="paths_schema", node=Paths)
    store(name="run_schema", node=Run)
    store(name="validate_schema", node=Validate)
    store(group="trace", name="synthetic_schema", node=SyntheticTrace)
    store(group="decode", name="block_diffusion_schema", node=BlockDiffusion)
    store(group="decode", name="canvas_diffusion_schema", node=CanvasDiffusion)
    store(group="decode", name="autoregressive_schema", node=Autoregressive)
    store(group="decode", name="speculative_autoregressive_schema", node=SpeculativeAutoregressive)
    store(group="decode", name="speculative_blocks_schema", node=SpeculativeBlocks)
