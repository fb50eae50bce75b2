"""Where the experts of a transformers model are, and the geometry that follows from them.

Shapes: E routed experts of a layer, H hidden size, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oled.errors import UserError
from oled.models.catalogue import MODELS
from oled.record.families import read_family
from oled.trace.schema import Geometry

_ROUTER_NAMES = ("gate", "router")  # beside the experts, in every family with fused experts


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """The routed part of one layer."""

    layer: int  # absolute
    name: str  # of the experts module
    experts: nn.Module
    router: nn.Module | None

    @property
    def num_experts(self) -> int:
        """E, read from the weights, so that pruned layers count right."""
        return int(self.experts.get_parameter("down_proj").shape[0])

    def plain_forward(self) -> Callable[..., Any]:
        """The experts' own forward, below transformers' dispatcher."""
        forward: Any = type(self.experts).forward
        if not hasattr(forward, "__wrapped__"):
            raise UserError(
                f"{self.name}: {type(self.experts).__name__} does not dispatch through "
                f"ALL_EXPERTS_FUNCTIONS; its routing can not be recorded"
            )
        return forward.__wrapped__  # type: ignore[no-any-return]


def moe_layers(model: PreTrainedModel) -> tuple[MoeLayer, ...]:
    """All layers with routed experts, in order. Works on a model on the meta device, too."""
    found: dict[int, MoeLayer] = {}
    for name, module in model.named_modules():
        if not _holds_experts(module):
            continue
        layer = _layer_id(name)
        if layer in found:
            raise UserError(
                f"two expert modules say layer {layer}: {found[layer].name} and {name}; "
                f"models with several stacks of layers can not be recorded yet"
            )
        block = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
        router = next((block[key] for key in _ROUTER_NAMES if key in block), None)
        found[layer] = MoeLayer(layer, name, module, router)
    return tuple(found[layer] for layer in sorted(found))


def _holds_experts(module: nn.Module) -> bool:
    """Fused experts are a module with a 3-D parameter `down_proj` (E first)."""
    own = dict(module.named_parameters(recurse=False))
    return "down_proj" in own and own["down_proj"].ndim == 3


def _layer_id(name: str) -> int:
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    raise UserError(f"the experts module '{name}' has no layer number in its name")


def geometry_of(model: PreTrainedModel, expert_dtype: torch.dtype | None = None) -> Geometry:
    """Read the geometry off the weights.

    `expert_dtype` is the one to count bytes in: a model that is run in fp32 on a CPU but stored in
    bf16 would be offloaded in bf16. By default the loaded one.
    """
    layers = moe_layers(model)
    if not layers:
        raise UserError(f"{type(model).__name__} has no routed experts")
    config = model.config.get_text_config()
    family = read_family(config)
    down = layers[-1].experts.get_parameter("down_proj")  # [E, H, I]
    geometry = Geometry(
        moe_layers=tuple(entry.layer for entry in layers),
        experts_per_layer=tuple(entry.num_experts for entry in layers),
        top_k=family.top_k,
        expert_bytes=tuple(_expert_bytes(entry, expert_dtype) for entry in layers),
        num_layers=config.num_hidden_layers,
        shared_experts=family.shared_experts,
        hidden_size=config.hidden_size,
        moe_intermediate_size=down[0].numel() // config.hidden_size,
    )
    return replace(geometry, name=_catalogue_name(geometry))


def _catalogue_name(geometry: Geometry) -> str | None:
    """The known model of this very shape."""
    for model in MODELS.values():
        experts = (model.num_experts,) * len(model.moe_layers)
        if (
            (model.num_layers, model.moe_layers) == (geometry.num_layers, geometry.moe_layers)
            and (experts, model.top_k) == (geometry.experts_per_layer, geometry.top_k)
            and model.hidden_size == geometry.hidden_size
            and model.moe_intermediate_size == geometry.moe_intermediate_size
        ):
            return model.name
    return None


def _expert_bytes(layer: MoeLayer, dtype: torch.dtype | None) -> int:
    """Bytes of one expert: its share of every stacked parameter, biases included."""
    size = 0
    for parameter in layer.experts.parameters(recurse=False):
        if parameter.shape[0] == layer.num_experts:
            size += parameter[0].numel() * (dtype or parameter.dtype).itemsize
    return size
