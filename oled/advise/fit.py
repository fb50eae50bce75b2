"""`oled fit`: what of a model fits a GPU and its host, and how many experts stay.

Bytes are those of the published weights; everything but the routed experts stays on the GPU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from oled.errors import UserError
from oled.models.geometry import ModelGeometry
from oled.sim.calibration import Calibration
from oled.sim.prepared import PreparedTrace

RESERVE_BYTES = 1 << 30
"""Left on the GPU for the CUDA context, workspaces and activations (assumed)."""
HOST_SHARE = 0.9
"""Of host memory that may be pinned; the rest is the system's (assumed)."""
_SHOWN = 16  # experts of a layer


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
    popular: tuple[tuple[int, ...], ...] = ()  # of each layer, on a trace, the most popular first
    popular_share: float | None = None  # of the trace's routed tokens that these take

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
                f"{_size(self.dense + self.kv_cache + self.reserve + staging)} are needed on the "
                f"GPU without any resident expert, gpu_memory is {_size(self.gpu_memory)}: shorten "
                f"the context, or take a larger GPU"
            )
        if self.pinned > HOST_SHARE * self.host_memory and self.slots < self.model.num_experts:
            found.append(
                f"the host store needs {_size(self.pinned)} of pinned memory, host_memory is "
                f"{_size(self.host_memory)} and {HOST_SHARE:.0%} of it may be pinned"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """All of it; `experts` are those that stay, by absolute layer, the most popular first."""
        data = dataclasses.asdict(self)
        del data["popular"]
        experts = {str(n): ids for n, ids in zip(self.model.moe_layers, self.popular, strict=False)}
        more = {"left": self.left, "problems": self.problems, "experts": experts}
        return {**data, "model": self.model.name, **more}

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
            f"{model.name} on a GPU of {_size(self.gpu_memory)}, host {_size(self.host_memory)}",
            *[f"  {name:18} {_size(size):>12}  {what}" for name, size, what in rows],
            f"  {'GPU in all':18} {_size(total):>12}",
        ]
        if self.slots == experts:
            return "\n".join([*lines, "everything fits the GPU: nothing needs to be offloaded"])
        lines.append(
            f"  {'pinned host store':18} {_size(self.pinned):>12}  all {experts * self.layers} "
            f"experts of {_size(model.expert_bytes)}"
        )
        if not self.staging:
            lines.append("without staging slots no expert can be copied: misses run on the CPU")
        if not self.problems:
            lines.append(f"cache.slots={self.slots} cache.staging={self.staging}")
        return "\n".join([*lines, *self._popular_lines()])

    def _popular_lines(self) -> list[str]:
        if self.popular_share is None or not self.slots:
            return []
        lines = [
            f"the {self.slots} most popular experts of each layer take "
            f"{self.popular_share:.1%} of the trace's routed tokens; the most popular first:"
        ]
        for layer, ids in zip(self.model.moe_layers, self.popular, strict=True):
            more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
            lines.append(f"  layer {layer}: {' '.join(map(str, ids[:_SHOWN]))}{more}")
        return lines


def fit(
    model: ModelGeometry,
    gpu_memory: int,
    host_memory: int,
    context: int,
    *,
    batch_size: int = 1,
    staging: int = 8,
    trace: PreparedTrace | None = None,
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
    dense = model.other_bytes
    kv_cache = model.kv_bytes_total(context) * batch_size
    left = gpu_memory - dense - kv_cache - RESERVE_BYTES - staging * model.expert_bytes
    slots = int(np.clip(left // (layers * model.expert_bytes), 0, model.num_experts))
    popular, share = ((), None) if trace is None else _popular(trace, model, slots)
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
        popular=popular,
        popular_share=share,
    )


def _popular(
    trace: PreparedTrace, model: ModelGeometry, slots: int
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """The experts of each layer that took most tokens (of equals the lower ids), and their share.

    Those that `policy=static_popularity calibration=TRACE` keeps.
    """
    experts = trace.steps.num_experts
    if experts.size != len(model.moe_layers) or (experts != model.num_experts).any():
        raise UserError(
            f"trace '{trace.name}' has {experts.size} MoE layers of {int(experts.max())} experts, "
            f"{model.name} has {len(model.moe_layers)} of {model.num_experts}"
        )
    prior = Calibration.from_steps(trace.steps).prior
    order = np.argsort(-prior, axis=1, kind="stable")[:, :slots]
    share = float(np.take_along_axis(prior, order, axis=1).sum(axis=1).mean())
    return tuple(map(tuple, order.tolist())), share


def _size(size: float) -> str:
    unit, name = (2**30, "GiB") if abs(size) >= 2**30 else (2**20, "MiB")
    return f"{size / unit:,.2f} {name}"
