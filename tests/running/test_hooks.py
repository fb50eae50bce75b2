"""Hooks leave no trace: after an exception, where one cannot be installed, when they are nested."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oled.running.hooks import Hooks, hook_routers, replace_experts
from oled.running.modules import moe_layers, router_stacks


class Silent(Hooks):
    """Experts that add nothing, and counted routers; `broken` fails after both are installed."""

    def __init__(self, model: PreTrainedModel, *, broken: bool = False) -> None:
        self.layers, self.broken, self.rows = moe_layers(model), broken, []

    def _install(self, installed: ExitStack) -> None:
        installed.enter_context(replace_experts(self.layers, lambda _r, _c, hidden, *_: hidden * 0))
        installed.enter_context(hook_routers(router_stacks(self.layers), self.count))
        if self.broken:
            raise KeyError("broken")

    def count(self, _: Any, row: int) -> Any:
        return lambda *_: self.rows.append(row)


def state(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything that hooks may touch."""
    routers = [m for stack in router_stacks(moe_layers(model)) for m in stack]
    configs = [entry.experts.config._experts_implementation for entry in moe_layers(model)]
    return sorted(ALL_EXPERTS_FUNCTIONS.keys()), configs, [len(r._forward_hooks) for r in routers]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(2, 8)[None]).logits


def test_a_failed_forward_leaves_the_model_as_it_was(qwen: PreTrainedModel) -> None:
    before, plain = state(qwen), logits(qwen)
    silent = Silent(qwen)
    with pytest.raises(RuntimeError), silent:
        qwen(torch.zeros(2, 3, 4, 5))  # no token ids
    assert state(qwen) == before
    with silent:
        assert not torch.equal(logits(qwen), plain)
        assert state(qwen) != before
    assert silent.rows == list(range(len(silent.layers)))
    assert state(qwen) == before
    assert torch.equal(logits(qwen), plain)


def test_a_failed_installation_leaves_the_model_as_it_was(qwen: PreTrainedModel) -> None:
    before = state(qwen)
    with pytest.raises(KeyError), Silent(qwen, broken=True):
        pass
    assert state(qwen) == before


def test_an_inner_replacement_gets_the_outer_one(qwen: PreTrainedModel) -> None:
    layers = moe_layers(qwen)
    seen: list[tuple[str, int]] = []

    def named(name: str) -> Any:
        def replacement(row: int, compute: Any, *tensors: torch.Tensor) -> torch.Tensor:
            seen.append((name, row))
            return compute(*tensors)

        return replacement

    plain = logits(qwen)
    with replace_experts(layers, named("outer")), replace_experts(layers, named("inner")):
        assert torch.equal(logits(qwen), plain)
    rows = range(len(layers))
    assert seen == [(name, row) for row in rows for name in ("inner", "outer")]
