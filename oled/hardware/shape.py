"""What the cost formulas need to know of a model: an expert, and everything but the experts."""

from __future__ import annotations

from dataclasses import dataclass

from oled.trace.schema import Geometry

MINI_LAYER_BYTES = 2 * (2048 * 3072 + 2048 * 2048 + 256 * 2048 + 3 * 2048 * 512)
"""bf16 weights of a LLaDA2.0-mini layer without routed experts: qkv, o, router, shared expert."""
FLASH_LAYER_BYTES = 2 * (4096 * 5120 + 4096 * 4096 + 256 * 4096 + 3 * 4096 * 1024)
"""The same of LLaDA2.0-flash."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One routed expert. `flops` of one token, 0 where the model's hidden size is not known."""

    bytes: int
    flops: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DenseShape:
    """Everything but the routed experts; parameters are counts, not bytes."""

    hidden: int
    vocabulary: int
    kv_bytes: int  # of one cached token in one layer
    attention_width: int  # query heads x head dim
    layer_params: int  # of a MoE layer: attention, router, shared experts
    dense_layer_params: int  # of a layer without routed experts: attention, feed-forward
    dense_layers: int  # how many of those


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole model."""

    name: str
    expert_bytes: int
    expert_flops: int  # of one token
    dense: DenseShape


@dataclass(frozen=True, slots=True)
class Shapes:
    """The classes of experts of a trace, its layers' class, and its dense part where known."""

    experts: tuple[ExpertShape, ...]  # [C]
    layer_class: tuple[int, ...]  # [L]
    dense: DenseShape | None
    activation_bytes: int  # of one token crossing between GPU and host, one way
    model: str  # whose costs they are
    labels: tuple[str, ...]


def resolve(geometry: Geometry, known: ModelShape | None, override: ModelShape | None) -> Shapes:
    """The shapes that a trace is costed with: its own, or those of `override`.

    `known` is the catalogue's entry of the trace's own model. bf16 activations.
    """
    if override is not None:
        return Shapes(
            experts=(ExpertShape(override.expert_bytes, override.expert_flops, geometry.top_k),),
            layer_class=(0,) * len(geometry.moe_layers),
            dense=override.dense,
            activation_bytes=2 * override.dense.hidden,
            model=override.name,
            labels=(f"rescaled: expert bytes, dense and head times of {override.name}",),
        )
    sizes = sorted(set(geometry.expert_bytes))
    flops = 0
    if geometry.hidden_size is not None and geometry.moe_intermediate_size is not None:
        flops = 6 * geometry.hidden_size * geometry.moe_intermediate_size  # 3 matrices, 2 flops
    labels = []
    if known is None:
        labels.append("partial_cost: no dense and head times (the model is not in the catalogue)")
    if not flops:
        labels.append("partial_cost: experts cost their bytes only (no hidden size)")
    return Shapes(
        experts=tuple(ExpertShape(size, flops, geometry.top_k) for size in sizes),
        layer_class=tuple(sizes.index(size) for size in geometry.expert_bytes),
        dense=known.dense if known is not None else None,
        activation_bytes=2 * (geometry.hidden_size or 0),
        model=geometry.name or "the trace",
        labels=tuple(labels),
    )
