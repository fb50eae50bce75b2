"""What the cost formulas need to know of a trace: its experts, and the model around them."""

from __future__ import annotations

from dataclasses import dataclass

from oled.models.catalogue import MODELS, ModelGeometry
from oled.trace.schema import Geometry


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One routed expert, or a part of it that is stored, copied and run by itself."""

    bytes: int  # of the whole expert
    flops: int  # of one token, whole; 0 where the model's hidden size is not known
    top_k: int
    share: float = 1.0  # of bytes, arithmetic and launches that this part takes

    @classmethod
    def of(cls, model: ModelGeometry, top_k: int, share: float = 1.0) -> ExpertShape:
        return cls(model.expert_bytes, 2 * model.expert_params, top_k, share)

    @property
    def stored_bytes(self) -> int:
        """What is copied and takes a slot."""
        return round(self.bytes * self.share)


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
    whole, share = _parts(geometry)
    if override is not None:
        shares = sorted(set(share))
        return Shapes(
            experts=tuple(ExpertShape.of(override, geometry.top_k, each) for each in shares),
            layer_class=tuple(shares.index(each) for each in share),
            model=override,
            name=override.name,
            activation_bytes=2 * override.hidden_size,
            labels=(
                f"rescaled: expert bytes, dense and head times of {override.name}",
                *_part_labels(geometry),
            ),
        )
    layers = list(zip(whole, share, strict=True))
    kinds = sorted(set(layers))
    model = MODELS.get(geometry.name or "")
    hidden, width = geometry.hidden_size, geometry.moe_intermediate_size
    labels = []
    if model is None:
        labels.append("partial_cost: no dense and head times (the model is not in the catalogue)")
    plane = (hidden or 0) * (width or 0)
    if not plane:
        labels.append("partial_cost: experts cost their bytes only (their width is not known)")
    return Shapes(
        experts=tuple(
            ExpertShape(
                b,
                2 * plane * (_matrices(b, plane) if model is None else model.matrices),
                geometry.top_k,
                part,
            )
            for b, part in kinds
        ),
        layer_class=tuple(kinds.index(layer) for layer in layers),
        model=model,
        name=geometry.name or "the trace's own geometry",
        activation_bytes=2 * (hidden or 0),
        labels=(*labels, *_part_labels(geometry)),
    )


def _matrices(size: int, plane: int) -> int:
    """Matrices of an expert of `size` bytes: 2 where that many of `plane` weights of 4, 2 or 1
    bytes are exactly its size (experts without a gate), else 3."""
    return 2 if size in (2 * 4 * plane, 2 * 2 * plane, 2 * plane) else 3


def _part_labels(geometry: Geometry) -> list[str]:
    if geometry.expert_parts == 1:
        return []
    return ["parts of experts: each takes its share, by bytes, of the whole expert's times"]


def _parts(geometry: Geometry) -> tuple[list[int], list[float]]:
    """Of each MoE layer: bytes of the whole expert, and the share of it that the layer holds."""
    sizes, parts = geometry.expert_bytes, geometry.expert_parts
    whole = [
        sum(sizes[first : first + parts])
        for first in range(0, len(sizes), parts)
        for _ in range(parts)
    ]
    return whole, [size / total for size, total in zip(sizes, whole, strict=True)]
