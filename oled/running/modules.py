"""The experts modules of a transformers model, and the geometry that follows from them.

Shapes: E routed experts of a layer, H hidden size, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oled.errors import UserError
from oled.models.catalogue import MODELS
from oled.running.families import read_family
from oled.trace.schema import Geometry

Stack = Sequence[nn.Module]
"""The routers of all MoE layers of one stack of layers, by row."""

_ROUTER_NAMES = ("gate", "router")  # beside the experts, in every family with fused experts


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """A module that computes a layer's experts, and its router."""

    name: str  # of the experts module
    experts: nn.Module
    router: nn.Module | None

    def plain_forward(self) -> Callable[..., Any]:
        """Return the experts' own forward, below transformers' dispatcher."""
        forward: Any = type(self.experts).forward
        if not hasattr(forward, "__wrapped__"):
            raise UserError(
                f"{self.name}: {type(self.experts).__name__} does not dispatch through "
                f"ALL_EXPERTS_FUNCTIONS; its routing can not be recorded"
            )
        return forward.__wrapped__  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """The routed part of one layer.

    It has several modules where a model has several stacks of layers over the same weights, such as
    DiffusionGemma's encoder and decoder; a forward goes through one of them.
    """

    layer: int  # absolute
    modules: tuple[ExpertsModule, ...]

    @property
    def name(self) -> str:
        """Return the name of the experts module, of the first where there are several."""
        return self.modules[0].name

    @property
    def experts(self) -> nn.Module:
        """Return the module that holds the weights; the first, where several share them."""
        return self.modules[0].experts

    @property
    def num_experts(self) -> int:
        """Return E, read from the weights, so that pruned layers count right."""
        return int(self.experts.get_parameter("down_proj").shape[0])


def moe_layers(model: PreTrainedModel) -> tuple[MoeLayer, ...]:
    """Return all layers with routed experts, in order. A model on the meta device will do."""
    found: dict[int, list[ExpertsModule]] = {}
    for name, module in model.named_modules():
        if not _holds_experts(module):
            continue
        block = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
        router = next((block[key] for key in _ROUTER_NAMES if key in block), None)
        experts = ExpertsModule(name, module, router)
        experts.plain_forward()  # refuses what does not go through the dispatcher
        found.setdefault(_layer_id(name), []).append(experts)
    for layer, modules in found.items():
        _refuse_strangers(layer, modules)
    return tuple(MoeLayer(layer, tuple(found[layer])) for layer in sorted(found))


def experts_of(layers: Sequence[MoeLayer]) -> list[nn.Module]:
    """Return every experts module, several of a layer in a model of several stacks."""
    return [each.experts for entry in layers for each in entry.modules]


def router_stacks(layers: Sequence[MoeLayer]) -> list[list[nn.Module]]:
    """Return the routers of every stack of layers, by row.

    Raises UserError where an experts module has no router beside it.
    """
    by_layer = [[_router_of(each) for each in entry.modules] for entry in layers]
    return [list(stack) for stack in zip(*by_layer, strict=True)]


def _router_of(experts: ExpertsModule) -> nn.Module:
    if experts.router is None:
        raise UserError(
            f"{experts.name} has no router beside it: its routing can be recorded, but there are "
            f"no scores and no predictions, and its routes can not be changed"
        )
    return experts.router


def _refuse_strangers(layer: int, modules: Sequence[ExpertsModule]) -> None:
    """Raise UserError unless the experts of a layer are the same weights, cached as one."""
    first, *others = modules
    for other in others:
        for name, parameter in first.experts.named_parameters(recurse=False):
            if other.experts.get_parameter(name) is not parameter:
                raise UserError(
                    f"layer {layer} has two sets of experts, {first.name} and {other.name}: "
                    f"models of several stacks are recorded only where these share their weights"
                )


def _holds_experts(module: nn.Module) -> bool:
    """Return whether a module holds fused experts: a 3-D parameter `down_proj` (E first)."""
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
    """Return the known model of this very shape."""
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
    """Return the bytes of one expert: its share of every stacked parameter, biases included."""
    size = 0
    for parameter in layer.experts.parameters(recurse=False):
        if parameter.shape[0] == layer.num_experts:
            size += parameter[0].numel() * (dtype or parameter.dtype).itemsize
    return size
