"""`oled fit`: what of a model fits a GPU and its host, and how many experts stay.

Bytes are those of the published weights; everything but the routed experts stays on the GPU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from oled.errors import UserError
from oled.models.catalogue import BF16, ModelGeometry
from oled.sim.calibration import Calibration
from oled.sim.subject import Subject

RESERVE_BYTES = 1 << 30
"""Left on the GPU for the CUDA context, workspaces and activations (assumed)."""
HOST_SHARE = 0.9
"""Of host memory that may be pinned; the rest is the system's (assumed)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes, and the slots that they leave."""

    model: ModelGeometry
    gpu_memory: int
    host_memory: int
    context: int
    batch_size: int
    staging: int
    dense: int  # weights that stay on the GPU in any case
    kv_cache: int
    reserve: int
    pinned: int  # the host store: all experts
    slots: int  # residents of a layer
    popular_share: float | None = None  # of the trace's routed tokens that the most popular take

    @property
    def layers(self) -> int:
        return len(self.model.moe_layers)

    @property
    def left(self) -> int:
        """For experts on the GPU; below zero where not even the rest fits."""
        return self.gpu_memory - self.dense - self.kv_cache - self.reserve

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it does not fit, in words."""
        found = []
        staging = self.staging * self.model.expert_bytes
        if self.left < staging:
            found.append(
                f"{_gib(self.dense + self.kv_cache + self.reserve + staging)} are needed on the "
                f"GPU without any resident expert, gpu_memory is {_gib(self.gpu_memory)}: shorten "
                f"the context, or take a larger GPU"
            )
        if self.pinned > HOST_SHARE * self.host_memory and self.slots < self.model.num_experts:
            found.append(
                f"the host store needs {_gib(self.pinned)} of pinned memory, host_memory is "
                f"{_gib(self.host_memory)} and {HOST_SHARE:.0%} of it may be pinned"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        return {**data, "model": self.model.name, "left": self.left, "problems": self.problems}

    def __str__(self) -> str:
        model, experts = self.model, self.model.num_experts
        resident = self.slots * self.layers * model.expert_bytes
        staging = self.staging * model.expert_bytes
        rows = [
            ("weights that stay", self.dense, "embeddings, attention, routers, shared experts"),
            ("KV cache", self.kv_cache, f"{self.context} tokens, batch {self.batch_size}"),
            ("reserve", self.reserve, "context, workspaces, activations: assumed"),
            ("staging", staging, f"{self.staging} slots"),
            ("resident experts", resident, f"{self.slots} of {experts} in each of {self.layers}"),
        ]
        total = sum(size for _, size, _ in rows)
        lines = [
            f"{model.name} on a GPU of {_gib(self.gpu_memory)}, host {_gib(self.host_memory)}",
            *[f"  {name:18} {_gib(size):>11}  {what}" for name, size, what in rows],
            f"  {'GPU in all':18} {_gib(total):>11}",
            f"  {'pinned host store':18} {_gib(self.pinned):>11}  all {experts * self.layers} "
            f"experts of {model.expert_bytes / 2**20:.2f} MiB",
        ]
        if self.slots == experts:
            lines.append("everything fits the GPU: nothing needs to be offloaded")
        elif not self.problems:
            lines.append(f"cache.slots={self.slots}")
        if self.popular_share is not None:
            lines.append(
                f"the {self.slots} most popular experts of each layer take "
                f"{self.popular_share:.1%} of the trace's routed tokens"
            )
        return "\n".join(lines)


def fit(
    model: ModelGeometry,
    gpu_memory: int,
    host_memory: int,
    context: int,
    *,
    batch_size: int = 1,
    staging: int = 8,
    trace: Subject | None = None,
) -> Fit:
    """What fits. With a trace of the same experts also how popular those that stay would be."""
    for name, value in (
        ("gpu_memory", gpu_memory),
        ("host_memory", host_memory),
        ("context", context),
        ("batch_size", batch_size),
    ):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if staging < 0:
        raise UserError(f"staging is {staging}; it must be 0 or more")
    layers = len(model.moe_layers)
    dense = round(model.other_params * BF16)
    kv_cache = model.kv_bytes_per_token * context * batch_size
    left = gpu_memory - dense - kv_cache - RESERVE_BYTES - staging * model.expert_bytes
    slots = int(np.clip(left // (layers * model.expert_bytes), 0, model.num_experts))
    return Fit(
        model=model,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        context=context,
        batch_size=batch_size,
        staging=staging,
        dense=dense,
        kv_cache=kv_cache,
        reserve=RESERVE_BYTES,
        pinned=model.experts_bytes_total,
        slots=slots,
        popular_share=None if trace is None else _popular_share(trace, model, slots),
    )


def _popular_share(trace: Subject, model: ModelGeometry, slots: int) -> float:
    experts = trace.steps.num_experts
    if experts.size != len(model.moe_layers) or (experts != model.num_experts).any():
        raise UserError(f"trace '{trace.name}' has other layers or experts than {model.name}")
    prior = np.sort(Calibration.from_steps(trace.steps).prior, axis=1)[:, ::-1]
    return float(prior[:, :slots].sum(axis=1).mean())


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
