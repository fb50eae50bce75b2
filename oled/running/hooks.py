"""Hooks in a running model: they watch or replace its routers and experts, and leave no trace.

transformers sends every experts module through `ALL_EXPERTS_FUNCTIONS`; `replace_experts` adds one
more function there. Shapes: N tokens of a pass, k top-k, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oled.running.modules import ExpertsModule, MoeLayer, Stack

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [N, H], ids [N, k], weights [N, k]) -> [N, H]: the experts as they were before."""
Replacement = Callable[[int, Compute, Tensor, Tensor, Tensor], Tensor]
"""(row of the MoE layer, its experts as they were before, hidden, ids, weights) -> [N, H]."""


class Hooks(ABC):
    """Install hooks on entering the context; remove all of them on leaving it.

    They are removed after an exception too, and when installing one of them fails. The context can
    be entered again after it was left.
    """

    _installed: ExitStack

    @abstractmethod
    def _install(self, installed: ExitStack) -> None:
        """Install every hook, and register with `installed` how each is removed."""

    def __enter__(self) -> Self:
        with ExitStack() as installed:
            self._install(installed)
            self._installed = installed.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()


@contextmanager
def replace_experts(layers: Sequence[MoeLayer], replacement: Replacement) -> Iterator[None]:
    """Compute the experts of these layers by `replacement` inside the context.

    Replacements nest: the inner one gets the outer one as "before". The configurations are set one
    by one, because transformers' own `set_experts_implementation` skips models whose source does
    not mention the dispatcher, such as subclasses.
    """
    before = {
        module.experts: (row, _current_function(module))
        for row, entry in enumerate(layers)
        for module in entry.modules
    }

    def function(
        module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor, **kwargs: Any
    ) -> Tensor:
        row, experts = before[module]
        return replacement(row, partial(experts, module, **kwargs), hidden, ids, weights)

    name = f"oled_{id(function):x}"
    configs: dict[int, Any] = {id(each.config): each.config for each in before}
    with ExitStack() as undo:
        ALL_EXPERTS_FUNCTIONS[name] = function
        undo.callback(ALL_EXPERTS_FUNCTIONS.pop, name)
        for config in configs.values():
            implementation = config._experts_implementation
            undo.callback(setattr, config, "_experts_implementation", implementation)
            config._experts_implementation = name
        yield


def _current_function(module: ExpertsModule) -> Callable[..., Tensor]:
    """Return what computes these experts now."""
    experts: Any = module.experts
    function: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS.get_interface(
        experts.config._experts_implementation, module.plain_forward()
    )
    return function


@contextmanager
def hook_routers(
    stacks: Sequence[Stack], make_hook: Callable[[Stack, int], Callable[..., Any]]
) -> Iterator[None]:
    """Call `make_hook(stack, row)` as a forward hook of every router inside the context."""
    with ExitStack() as undo:
        for stack in stacks:
            for row, router in enumerate(stack):
                undo.callback(router.register_forward_hook(make_hook(stack, row)).remove)
        yield
