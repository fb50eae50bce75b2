"""Hooks that see the routing of any transformers model with fused experts, and change nothing.

In place of the experts the recorder copies ids and applied weights, and then computes the experts
as before. Router scores and predictions come from forward hooks on the routers.

Shapes: N tokens of a pass, E experts, k top-k, m kept scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from oled.errors import UserError
from oled.running.capture import Capture, Predicted, Staging
from oled.running.families import read_family
from oled.running.hooks import Compute, Hooks, hook_routers, replace_experts
from oled.running.modules import Stack, moe_layers, router_stacks
from oled.running.predictors import NextGate, Predictor, trained_predictors
from oled.running.scores import refuse_unknown_scores, router_scores

SUM_TOLERANCE = 0.01  # relative; bf16 rows were seen to add up to 0.9975 .. 1.0024


class Recorder(Hooks):
    """A context: inside it, run one forward, then `take` what it routed.

    `score_width` m > 0 keeps the m best router scores of each token; `horizons` H > 0 asks the
    gates of the next 1..H MoE layers what they would do with this layer's gate input; `heads` (a
    file, or "bundled") asks trained predictors. Leaving the context gives the model back as it was.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        score_width: int = 0,
        horizons: int = 0,
        heads: str | Path | None = None,
    ) -> None:
        self.layers = moe_layers(model)
        if not self.layers:
            raise UserError(f"{type(model).__name__} has no routed experts: nothing to record")
        self.family = read_family(model.config)
        self.horizons = min(horizons, len(self.layers) - 1)
        self.score_width = min(score_width, *(entry.num_experts for entry in self.layers))
        listens = score_width or horizons or heads is not None
        self._stacks = self._find_routers() if listens else []
        self.predictors = self._find_predictors(heads)
        self._predicted: dict[tuple[str, int], set[int]] = {}  # rows by predictor and layers ahead
        self._staging = Staging(len(self.layers))
        self._tokens = 0
        self._reset()
        self._verified = False

    def _install(self, installed: ExitStack) -> None:
        installed.callback(self._reset)
        installed.enter_context(replace_experts(self.layers, self._on_experts))
        installed.enter_context(hook_routers(self._stacks, self._router_hook))

    def take(self, tokens: int) -> Capture:
        """Return the routing of the forward just run over `tokens` = N tokens; wait for its copies.

        Refuses a forward in which the hook of any layer did not fire exactly once.
        """
        fired, asked, routed = self._fired, self._asked, self._tokens
        self._reset()
        self._check_fired(fired, "experts")
        if self._stacks:
            self._check_fired(asked, "router")
        if routed != tokens:
            raise UserError(f"{self.layers[0].name} routed {routed} tokens of {tokens}")
        self._staging.wait()
        capture = self._read(tokens)
        if not self._verified and (capture.expert_ids >= 0).all():  # drafts execute a part
            self._verify_weights(capture)
            self._verified = True
        return capture

    def _reset(self) -> None:
        self._fired = [0] * len(self.layers)
        self._asked = [0] * len(self.layers)

    def _check_fired(self, counts: list[int], what: str) -> None:
        for entry, count in zip(self.layers, counts, strict=True):
            if count != 1:
                raise UserError(
                    f"layer {entry.layer} ({entry.name}): the hook of its {what} fired {count} "
                    f"times in a forward, not once ({counts.count(1)} of {len(counts)} layers are "
                    f"right). Compiled or captured forwards and fused kernels bypass hooks: load "
                    f"the model without them"
                )

    def _on_experts(
        self, row: int, compute: Compute, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """Keep ids and weights [N, k] of a layer and compute its experts as before."""
        if not any(self._fired):
            self._tokens = len(ids)
        elif len(ids) != self._tokens:
            raise UserError(
                f"layer {self.layers[row].layer} routed {len(ids)} tokens, the layers before it "
                f"{self._tokens}: such a model can not be recorded"
            )
        self._fired[row] += 1
        unused = self.family.top_k - ids.shape[1]  # a draft executes fewer than the router chose
        self._staging.put("expert_ids", row, functional.pad(ids, (0, unused), value=-1))
        self._staging.put("weights", row, functional.pad(weights, (0, unused)))
        return compute(hidden, ids, weights)

    def _find_routers(self) -> list[list[nn.Module]]:
        if self.score_width:
            refuse_unknown_scores(self.family)
        return router_stacks(self.layers)

    def _find_predictors(self, heads: str | Path | None) -> tuple[Predictor, ...]:
        found: tuple[Predictor, ...] = (NextGate(self.horizons),) if self.horizons else ()
        if heads is None:
            return found
        if len(self._stacks) > 1:
            raise UserError("heads predict one stack of layers; this model has several")
        kept = self.score_width or self.family.top_k
        return (*found, *trained_predictors(heads, self._stacks[0], self.family, kept))

    def _router_hook(self, stack: Stack, row: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            self._asked[row] += 1
            if self.score_width:
                self._put_scores(stack[row], row, output[0])
            for predictor in self.predictors:
                for ahead, ids, values in predictor.predict(stack, row, inputs[0]):
                    self._predicted.setdefault((predictor.name, ahead), set()).add(row)
                    self._staging.put(f"{predictor.name} {ahead} ids", row, ids)
                    self._staging.put(f"{predictor.name} {ahead} values", row, values)

        return hook

    def _put_scores(self, router: nn.Module, row: int, logits: Tensor) -> None:
        """Keep the m best scores of logits [N, E], by the score that selects."""
        values, biased = router_scores(self.family.scoring, router, logits)
        best, ids = (values if biased is None else biased).topk(self.score_width, dim=-1)
        self._staging.put("score_ids", row, ids)
        self._staging.put("score_values", row, values.gather(-1, ids))
        if biased is not None:
            self._staging.put("score_biased", row, best)

    def _read(self, tokens: int) -> Capture:
        def read(name: str) -> Any:
            return self._staging.read(name, tokens)

        return Capture(
            layers=np.array([entry.layer for entry in self.layers], dtype=np.uint16),
            num_experts=np.array([entry.num_experts for entry in self.layers]),
            expert_ids=read("expert_ids"),
            weights=read("weights"),
            predicted=tuple(
                Predicted(
                    name,
                    ahead,
                    frozenset(rows),
                    read(f"{name} {ahead} ids"),
                    read(f"{name} {ahead} values"),
                )
                for (name, ahead), rows in self._predicted.items()
            ),
            score_ids=read("score_ids") if self.score_width else None,
            score_values=read("score_values") if self.score_width else None,
            score_biased=read("score_biased") if self._staging.holds("score_biased") else None,
        )

    def _verify_weights(self, capture: Capture) -> None:
        """Raise UserError where weights do not add up to what the configuration promises."""
        expected = self.family.expected_sum
        if expected is None:
            return
        sums = capture.weights.sum(-1)  # [Lr, N]
        wrong = np.argwhere(~(abs(sums - expected) <= SUM_TOLERANCE * expected))
        if len(wrong):
            row, token = wrong[0]
            raise UserError(
                f"layer {self.layers[row].layer}, token {token}: the weights add up to "
                f"{sums[row, token]:.4f}; the configuration of '{self.family.model_type}' says "
                f"{expected:g}: record with a transformers version that oled knows"
            )
