"""What the cost formulas need to know of a trace: its experts, and the model around them."""

from __future__ import annotations

from dataclasses import dataclass

from oled.models.catalogue import MODELS, ModelGeometry
from oled.trace.schema import Geometry


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One routed expert."""

    bytes: int
    flops: int  # of one token; 0 where the model's hidden size is not known
    top_k: int

    @classmethod
    def of(cls, model: ModelGeometry, top_k: int) -> ExpertShape:
        return cls(model.expert_bytes, 2 * model.expert_params, top_k)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The classes of experts of a trace, its layers' class, and its model where known."""

    experts: tuple[ExpertShape, ...]  # [C]
    layer_class: tuple[int, ...]  # [L]
    model: ModelGeometry | None  # whose dense and head times are taken
    name: str  # whose costs they are
    activation_bytes: int  # of one token crossing between GPU and host, one way, bf16
    labels: tuple[str, ...]


def resolve(geometry: Geometry, override: ModelGeometry | None) -> Shapes:
    """The shapes that a trace is costed with: its own, or those of `override`."""
    if override is not None:
        return Shapes(
            experts=(ExpertShape.of(override, geometry.top_k),),
            layer_class=(0,) * len(geometry.moe_layers),
            model=override,
            name=override.name,
            activation_bytes=2 * override.hidden_size,
            labels=(f"rescaled: expert bytes, dense and head times of {override.name}",),
        )
    sizes = sorted(set(geometry.expert_bytes))
    model = MODELS.get(geometry.name or "")
    hidden, width = geometry.hidden_size, geometry.moe_intermediate_size
    params = 3 * hidden * width if hidden is not None and width is not None else 0
    labels = []
    if model is None:
        labels.append("partial_cost: no dense and head times (the model is not in the catalogue)")
    if not params:
        labels.append("partial_cost: experts cost their bytes only (their width is not known)")
    return Shapes(
        experts=tuple(ExpertShape(size, 2 * params, geometry.top_k) for size in sizes),
        layer_class=tuple(sizes.index(size) for size in geometry.expert_bytes),
        model=model,
        name=geometry.name or "the trace's own geometry",
        activation_bytes=2 * (hidden or 0),
        labels=tuple(labels),
    )
