"""The model's shape: what the user says, what the catalogue knows, what the recording shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from oled.errors import UserError
from oled.models.catalogue import model_geometry
from oled.trace.errors import TraceError
from oled.trace.manifest import Manifest
from oled.trace.options import OptionError, Options
from oled.trace.schema import ConfidenceKind, Geometry, WeightKind

FACTS = {
    "model": "name in the catalogue (oled list models): gives all that follows",
    "experts": "routed experts of a layer, or a list with one number for each MoE layer",
    "top_k": "experts a token",
    "expert_bytes": "bytes of one expert, as 6MiB",
    "layers": "layers of the model, dense ones included",
    "moe_layers": "absolute ids of the layers with experts, as 1-19",
}
"""Options that every importer takes whose source does not say these things."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before the recording is read; None is unknown."""

    moe_layers: tuple[int, ...] | None = None
    num_layers: int | None = None
    experts: tuple[int, ...] | None = None  # one number for all layers, or one for each
    top_k: int | None = None
    expert_bytes: int | None = None
    model: str | None = None

    @classmethod
    def of(cls, options: Options) -> Self:
        """Join the catalogue's numbers with those that were given, which come first."""
        name = options.text("model")
        known: dict[str, Any] = {}
        if name is not None:
            try:
                model = model_geometry(name)
            except UserError as error:
                raise TraceError(f"model={name}: {error}") from None
            known = {
                "moe_layers": model.moe_layers,
                "num_layers": model.num_layers,
                "experts": (model.num_experts,),
                "top_k": model.top_k,
                "expert_bytes": model.expert_bytes,
            }
        given = {
            "moe_layers": options.integers("moe_layers"),
            "num_layers": options.integer("layers"),
            "experts": options.integers("experts"),
            "top_k": options.integer("top_k"),
            "expert_bytes": options.size("expert_bytes"),
        }
        known |= {key: value for key, value in given.items() if value is not None}
        if known.get("top_k") == 0:
            raise OptionError("top_k=0: a token has one expert at least")
        return cls(**known, model=name)

    def layer_ids(self, count: int) -> tuple[int, ...]:
        """Return absolute ids of a recording's layer axis: all layers, or the MoE layers."""
        if self.moe_layers is not None and len(self.moe_layers) == count:
            return self.moe_layers
        if self.num_layers is None and self.moe_layers is None:
            return tuple(range(count))
        if self.num_layers in (count, None) and max(self.moe_layers or (0,)) < count:
            return tuple(range(count))
        raise TraceError(
            f"the recording has {count} layers; a model of {self.num_layers} layers, of which "
            f"{'some' if self.moe_layers is None else len(self.moe_layers)} have experts, was named"
        )

    def require_top_k(self, found: int | None = None) -> int:
        """Return the experts a token, from the recording or as given."""
        return int(_agreed("top_k", "experts a token", self.top_k, found))

    def geometry(
        self,
        moe_layers: tuple[int, ...],
        top_k: int,
        *,
        experts: int | None = None,
        num_layers: int | None = None,
    ) -> Geometry:
        """Return the shape, once the recording has shown its layers and, maybe, its experts."""
        if self.moe_layers is not None and self.moe_layers != moe_layers:
            raise TraceError(
                f"moe_layers: layers {_brief(self.moe_layers)} were named, the recording has "
                f"experts in {_brief(moe_layers)}"
            )
        counts = self._counts(experts, len(moe_layers))
        if self.expert_bytes is None:
            raise _unsaid("expert_bytes", "bytes of an expert")
        sizes: dict[str, Any] = {}
        model = None if self.model is None else model_geometry(self.model)
        if model is not None and (model.top_k, {model.num_experts}) == (top_k, set(counts)):
            sizes = {
                "shared_experts": model.shared_experts,
                "hidden_size": model.hidden_size,
                "moe_intermediate_size": model.moe_intermediate_size,
                "name": self.model,
            }
        return Geometry(
            moe_layers=moe_layers,
            experts_per_layer=counts,
            top_k=top_k,
            expert_bytes=(self.expert_bytes,) * len(moe_layers),
            num_layers=self.num_layers or num_layers or moe_layers[-1] + 1,
            **sizes,
        )

    def _counts(self, found: int | None, layers: int) -> tuple[int, ...]:
        """Return experts of each MoE layer."""
        if self.experts is None or len(self.experts) == 1:
            given = None if self.experts is None else self.experts[0]
            return (int(_agreed("experts", "experts of a layer", given, found)),) * layers
        return self.experts

    def manifest(
        self, geometry: Geometry, about: dict[str, Any], lacks: tuple[str, ...], **more: Any
    ) -> Manifest:
        """Describe a source without confidences, nor weights unless `more` says otherwise."""
        fields: dict[str, Any] = {
            "weight_kind": WeightKind.NONE,
            "confidence_kind": ConfidenceKind.NONE,
            "model": {"id": self.model or "unknown", "revision": None, "dtype": None},
            **more,
        }
        return Manifest(geometry, provenance=about, lacks=lacks, **fields)


def _agreed(key: str, words: str, given: Any, found: Any) -> Any:
    if given is not None and found is not None and given != found:
        raise TraceError(f"{key}: {given} {words} were named, the recording has {found}")
    value = found if given is None else given
    if value is None:
        raise _unsaid(key, words)
    return value


def _unsaid(key: str, words: str) -> TraceError:
    return TraceError(f"the recording does not say the {words}: give {key}=… or model=NAME")


def _brief(layers: tuple[int, ...]) -> str:
    return f"{layers[0]}..{layers[-1]} ({len(layers)})" if layers else "none"
