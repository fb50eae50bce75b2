"""transformers sends every experts module to a function of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oled.running.modules import MoeLayer

ExpertsFunction = Callable[..., Tensor]
"""(module, hidden [N, H], ids [N, k], weights [N, k], …) -> [N, H]."""


@contextmanager
def dispatched(layers: Sequence[MoeLayer], function: ExpertsFunction) -> Iterator[None]:
    """Inside, all experts of these layers are computed by `function`; afterwards as before.

    The configurations are set one by one: transformers' own `set_experts_implementation` passes
    models by whose source does not mention the dispatcher, such as subclasses.
    """
    name = f"oled_{id(function):x}"
    configs = {id(config): config for config in map(_config_of, experts_of(layers))}
    with ExitStack() as undo:
        ALL_EXPERTS_FUNCTIONS[name] = function
        undo.callback(ALL_EXPERTS_FUNCTIONS.pop, name)
        for config in configs.values():
            before = config._experts_implementation
            undo.callback(setattr, config, "_experts_implementation", before)
            config._experts_implementation = name
        yield


def current_functions(layers: Sequence[MoeLayer]) -> dict[nn.Module, ExpertsFunction]:
    """What computes each experts module now."""
    return {
        place.experts: ALL_EXPERTS_FUNCTIONS.get_interface(
            _config_of(place.experts)._experts_implementation, place.plain_forward()
        )
        for entry in layers
        for place in entry.places
    }


def experts_of(layers: Sequence[MoeLayer]) -> list[nn.Module]:
    """Every experts module, several of a layer where it has several places."""
    return [place.experts for entry in layers for place in entry.places]


def _config_of(experts: Any) -> Any:
    """The configuration that the dispatcher asks."""
    return experts.config
