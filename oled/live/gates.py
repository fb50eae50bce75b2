"""Router scores and predictions of a decoding model, for policies that use them.

Shapes: T tokens, E experts, k top-k.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from oled.errors import UserError
from oled.live.foresight import Predicted
from oled.policies.composition import Composition
from oled.running.capture import wanted
from oled.running.families import read_family
from oled.running.hooks import Hooks, hook_routers
from oled.running.modules import MoeLayer, Stack, router_stacks
from oled.running.predictors import NextGate, Predictor, trained_predictors
from oled.running.scores import refuse_unknown_scores, router_scores

HORIZONS = 3
"""Layers ahead whose gates are asked where a policy names no predictor; HybriMoE looks at three."""


class RouterOutput(NamedTuple):
    """Router scores and predictions of one layer-step."""

    scores: NDArray[np.float32]  # [E of the widest layer] mean over the tokens, or [0]
    predictions: Mapping[int, Predicted]  # by MoE layers ahead
    ask_ns: int  # wall time that all of this took


NO_OUTPUT = RouterOutput(np.zeros(0, np.float32), {}, 0)


def predictor_for(
    composition: Composition,
    model: PreTrainedModel,
    layers: Sequence[MoeLayer],
    heads: str | Path | None,
    device: str,
) -> Predictor | None:
    """Return the predictor that the policy needs, or None.

    `heads`: a file of trained predictors, or "bundled"; `device`: where the model will run.
    """
    if not composition.needs & {"predictions", "coming"}:
        return None
    if composition.predictor is None:
        return NextGate(HORIZONS)
    if heads is None:
        raise UserError(
            f"policy '{composition.name}' follows a trained predictor: give heads=FILE of "
            f"experiments/training/train_predictors.py (heads=bundled: the small model's)"
        )
    stacks = router_stacks(layers)
    if len(stacks) > 1:
        raise UserError("heads predict one stack of layers; this model has several")
    widest = max(entry.num_experts for entry in layers)
    found = trained_predictors(heads, stacks[0], read_family(model.config), widest, device)
    for predictor in found:
        if predictor.name == composition.predictor:
            return predictor
    names = ", ".join(predictor.name for predictor in found)
    raise UserError(f"{heads}: no predictor '{composition.predictor}', only {names}")


class Gates(Hooks):
    """A context with hooks on the routers; `take` returns the output of the last router.

    `predictor`, if any, gets each layer's gate input.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoeLayer],
        *,
        scores: bool,
        predictor: Predictor | None,
    ) -> None:
        family = read_family(model.config)
        if scores:
            refuse_unknown_scores(family)
        self.horizons = 0 if predictor is None else predictor.reach(len(layers))
        self._predictor = predictor
        self._scoring = family.scoring if scores else None
        self._stacks = router_stacks(layers) if scores or self.horizons else []
        self._experts = [entry.num_experts for entry in layers]
        self._output = NO_OUTPUT

    def _install(self, installed: ExitStack) -> None:
        installed.enter_context(hook_routers(self._stacks, self._hook))

    def take(self) -> RouterOutput:
        """Return the router output since the last call."""
        output, self._output = self._output, NO_OUTPUT
        return output

    def _hook(self, stack: Stack, row: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            began, scores = time.perf_counter_ns(), NO_OUTPUT.scores
            if self._scoring is not None:
                values, _biased = router_scores(self._scoring, stack[row], output[0])
                scores = np.zeros(max(self._experts), np.float32)
                scores[: self._experts[row]] = values.mean(0).cpu().numpy()
            predictions = self._predict(stack, row, inputs[0])
            self._output = RouterOutput(scores, predictions, time.perf_counter_ns() - began)

        return hook

    def _predict(self, stack: Stack, row: int, hidden: Tensor) -> dict[int, Predicted]:
        """Return the predictions by layers ahead, in the form of a recorder."""
        if self._predictor is None:
            return {}
        return {
            distance: wanted(
                ids.cpu().numpy(),
                values.float().cpu().numpy(),
                self._experts[(row + distance) % len(stack)],
            )
            for distance, ids, values in self._predictor.predict(stack, row, hidden)
        }
